"""Device functions that several kernels share: gates, planes, row addresses, split products."""
