"""The performance harness: run from the checkout, never installed. docs/perf.md says how."""
