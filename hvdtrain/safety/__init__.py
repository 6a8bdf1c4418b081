"""Exit statuses, watchdog, guard, injected faults, and files where others may write."""
