"""The benchmark: what a decode step and a prompt cost, beside the hardware's limit and another implementation."""
