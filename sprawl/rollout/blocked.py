"""Routes with which vLLM and SGLang let themselves be administered.

Nothing is proxied, so none of them exists here; they are answered by name (403), so that who tries one learns that the
sidecar manages the engine instead of looking for a typing error. Sources: vLLM 0.32 (`entrypoints/rl`, `serve`) and
SGLang (`srt/entrypoints/http_server.py`): what changes or reveals weights, caches, scheduling, adapters or memory.
"""

from __future__ import annotations

# fmt: off
VLLM = frozenset({
    "pause", "resume", "is_paused", "abort_requests", "sleep", "wake_up", "is_sleeping", "collective_rpc",
    "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
    "start_draft_weight_update", "update_weights", "finish_weight_update", "update_weight_version", "weight_info",
    "weight_checker", "get_world_size", "reset_prefix_cache", "reset_mm_cache", "reset_encoder_cache",
    "release_kv_cache_memory", "scale_elastic_ep", "is_scaling_elastic_ep", "fault_tolerance/apply",
    "start_profile", "stop_profile", "v1/load_lora_adapter", "v1/unload_lora_adapter", "inference/v1/generate",
})
SGLANG = frozenset({
    "update_weights", "update_weights_from_disk", "update_weights_from_cpu", "update_weights_from_tensor",
    "update_weights_from_distributed", "update_weights_from_ipc", "init_weights_update_group",
    "destroy_weights_update_group", "init_weights_send_group_for_remote_instance",
    "send_weights_to_remote_instance", "stage_weight_update", "post_process_weights", "weights_checker",
    "get_weights_by_name", "update_weight_version", "get_weight_version", "pause_generation",
    "continue_generation", "abort_request", "flush_cache", "clear_hicache_storage_backend",
    "hicache/storage-backend", "release_memory_occupation", "resume_memory_occupation", "slow_down",
    "set_internal_state", "load_lora_adapter", "load_lora_adapter_from_tensors", "unload_lora_adapter",
    "start_profile", "stop_profile", "freeze_gc", "configure_logging", "set_trace_level",
    "start_expert_distribution_record", "stop_expert_distribution_record", "dump_expert_distribution_record",
    "open_session", "close_session", "generate_from_file",
})
# fmt: on
BLOCKED = VLLM | SGLANG


def is_blocked(path: str) -> bool:
    """Whether `path` names an admin route of an engine, however it is spelled: case, doubled and trailing slashes."""
    return "/".join(part for part in path.casefold().split("/") if part) in BLOCKED
