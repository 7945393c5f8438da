"""The tables and figures of the papers whose policies kvjax has, at the scale of a model at hand."""
