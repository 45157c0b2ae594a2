"""How each kind of engine speaks, as one table. A new engine is a new row."""

from __future__ import annotations

from typing import Final

from ..contract import Dialect

_VLLM_FIELDS: Final = frozenset(
    {
        "request_id", "priority", "session_id", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
        "stream_interval", "cache_salt", "data_parallel_rank",
    }
)  # fmt: skip
_SGLANG_FIELDS: Final = frozenset(
    {
        "rid", "priority", "session_id", "session_params", "custom_logit_processor", "custom_params",
        "cache_salt", "extra_key", "bootstrap_host", "bootstrap_port", "bootstrap_room",
        "data_parallel_rank", "lora_path", "stream_interval",
    }
)  # fmt: skip
_LLAMACPP_FIELDS: Final = frozenset({"id_slot", "sse_ping_interval", "response_fields", "lora"})
# The last makes it answer 200 with the prompt as it would be read, and no choice: a fault by the looks of it.
_OLLAMA_FIELDS: Final = frozenset({"keep_alive", "options", "_debug_render_only"})
_ALL_FIELDS: Final = _VLLM_FIELDS | _SGLANG_FIELDS | _LLAMACPP_FIELDS | _OLLAMA_FIELDS

DIALECTS: Final[dict[str, Dialect]] = {
    dialect.kind: dialect
    for dialect in (
        Dialect("vllm", True, b"X-Request-Id", None, True, False, 0.5, _VLLM_FIELDS),
        Dialect("sglang", True, None, "rid", True, False, 4.0, _SGLANG_FIELDS),
        Dialect("llamacpp", False, None, None, False, True, 1.5, _LLAMACPP_FIELDS),
        Dialect("tgi", False, None, None, False, False, 0.5, frozenset()),
        Dialect("ollama", False, None, None, False, False, 1.5, _OLLAMA_FIELDS, native_chat=True),
        # What stands behind an agent may be any of the others.
        Dialect("agent", False, None, None, True, False, 5.0, _ALL_FIELDS, agent=True),
        Dialect("openai", False, None, None, False, False, 0.5, frozenset()),
    )
}
