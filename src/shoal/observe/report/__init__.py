"""A run, or several side by side, as one page that needs nothing else: no network, no server, no library."""

from shoal.observe.report.write import write_comparison, write_report

__all__ = ["write_comparison", "write_report"]
