"""The model: weights, one forward over a batch of slots, and the sampler. Importing this package loads no torch."""
