"""What a device, a model and a trace are as numbers, what follows from them by arithmetic, and how that
compares with what the Lamina papers print. Runs nothing on a device, and imports no JAX."""
