"""What Prometheus is told to read: a run's own endpoint, Ray's metrics agents, and NVIDIA's exporter."""

from typing import Any

PORT = 9765
"""What the docs propose for observe.metrics_port."""
DCGM_PORT = 9400
RAY_TARGETS = "/tmp/ray/prom_metrics_service_discovery.json"  # noqa: S108 - where Ray writes it
_RENAME = {"source_labels": ["__name__"], "regex": "ray_(shoal_.+)", "target_label": "__name__", "replacement": "$1"}


def scrape_config() -> dict[str, Any]:
    """As Prometheus reads it."""
    return {
        "global": {"scrape_interval": "15s", "scrape_timeout": "10s", "evaluation_interval": "15s"},
        "rule_files": ["alerts.yml"],
        "scrape_configs": [
            {
                "job_name": "shoal",
                "static_configs": [{"targets": [f"127.0.0.1:{PORT}"]}],
                "file_sd_configs": [{"files": ["targets/shoal*.yml"]}],
            },
            {
                "job_name": "ray",
                "file_sd_configs": [{"files": [RAY_TARGETS, "targets/ray*.yml"]}],
                # Ray puts its name before those of a run's metrics; without it they are the same as the endpoint's.
                "metric_relabel_configs": [_RENAME, {"regex": "otel_scope_.+", "action": "labeldrop"}],
            },
            {
                "job_name": "dcgm",
                "static_configs": [{"targets": [f"127.0.0.1:{DCGM_PORT}"]}],
                "file_sd_configs": [{"files": ["targets/dcgm*.yml"]}],
            },
        ],
    }
