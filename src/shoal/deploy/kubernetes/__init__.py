"""Kubernetes, by the Helm chart in `deploy/helm/shoal` and the KubeRay operator: a cluster, or a job with its own."""
