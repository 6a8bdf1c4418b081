"""Settings: options, command line, and how ranks agree on them before anything heavy is imported."""
