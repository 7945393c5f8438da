# Kernels compiled ahead of time for TPUs and GPUs that this machine does not have. Each platform's compiler comes with
# its own wheels, and the two do not live in one environment.
PYTHON ?= python3

.PHONY: aot
aot: .venv-aot-tpu .venv-aot-gpu
	.venv-aot-tpu/bin/python -m tools.aot --out docs/kernels.md
	.venv-aot-tpu/bin/python -m tools.aot.seconds --page docs/kernels.md
	.venv-aot-tpu/bin/python -m tools.aot.step_limit --page docs/kernels.md

# A model on meshes of TPUs, all 32 layers of it; LAYERS=4 is four of them.
LAYERS ?= 32
.PHONY: aot-mesh
aot-mesh: .venv-aot-tpu
	.venv-aot-tpu/bin/python -m tools.aot.mesh --layers $(LAYERS) --out docs/sharding.md

.venv-aot-tpu:
	$(PYTHON) -m venv $@
	$@/bin/pip install -q "jax[tpu]>=0.10.2,<0.13" flax jaxtyping numpy

.venv-aot-gpu:
	$(PYTHON) -m venv $@
	$@/bin/pip install -q "jax[cuda13]>=0.10.2,<0.13" flax jaxtyping numpy
