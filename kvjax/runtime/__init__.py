"""The compiled programs and the host loop around them: prefill, decode, sampling, stop conditions."""
