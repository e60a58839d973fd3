"""Where clusters come from: Kubernetes, Docker, cloud machines; and what is wrong with one."""
