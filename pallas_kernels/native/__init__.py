"""The native CPU kernels' sources, and how they are built. `pallas_kernels.cpu` is their backend."""
