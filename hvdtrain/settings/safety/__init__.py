"""Exit statuses, watchdog, guard, memory checks, injected faults, and safe access to files in shared folders."""
