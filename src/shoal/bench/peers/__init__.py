"""Scripts as one would write them without Shoal: the baselines that it is measured against. They stand alone."""
