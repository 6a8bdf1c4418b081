"""Exit statuses, watchdog, guard, room for ranks, injected faults, and files where others may write."""
