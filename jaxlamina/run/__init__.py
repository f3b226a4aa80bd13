"""Running steps: what every executor is, and the three there are: `local`, `unsplit` and `ranks`."""
