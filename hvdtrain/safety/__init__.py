"""Exit statuses, watchdog, guard, and injected faults."""
