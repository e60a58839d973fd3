"""A run as Prometheus sees it: metrics and an endpoint, and the alerts, dashboard and configuration that ship."""
