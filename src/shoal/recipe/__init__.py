"""What a run is: the sections composed, loaded, overridden, checked. Imports no torch and no ray."""
