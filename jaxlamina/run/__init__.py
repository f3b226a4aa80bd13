"""Running steps. Import from the modules: `executor` (what every executor is)."""
