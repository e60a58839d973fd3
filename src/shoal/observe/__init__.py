"""What is seen of a run: step timing, verdict, goodput, the sinks that write and show it, and reading runs back."""
