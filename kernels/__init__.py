"""Device code of fitune's MoE layer: Triton kernels, their launch, and torch references."""
