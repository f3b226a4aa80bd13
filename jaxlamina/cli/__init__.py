"""The command line. Every command imports what it needs when it runs, so that `--help` needs no JAX."""
