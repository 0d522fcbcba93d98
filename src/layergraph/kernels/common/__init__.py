"""What the three shadow ops share: argument checks, the phases kernels are made of, and how a kernel is launched."""
