"""Served views: the policy exactly as engines hold it, in the layouts they load. `formats` names the sources."""

from sprawl.delta.views.build import dense_view, make_view
from sprawl.delta.views.formats import FORMATS, Format, find_format, is_quantized_weight, quantization_config
from sprawl.delta.views.lora import adapter_config, adapter_view, is_adapter

__all__ = [
    "FORMATS",
    "Format",
    "adapter_config",
    "adapter_view",
    "dense_view",
    "find_format",
    "is_adapter",
    "is_quantized_weight",
    "make_view",
    "quantization_config",
]
