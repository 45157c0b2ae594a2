"""llama.cpp's own HTTP server as a process: ``python -m trio_gateway.agent.engines._llamacpp_server``.

Loads a model, prints one line ``{"url": ..., "slots": ...}`` on standard output
when it serves, and ends when standard input ends. So no engine outlives whoever
started it, not even one that was killed.

Kept out of the package's imports: only this process loads llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import xllamacpp


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description="Serve a GGUF model on a free port of 127.0.0.1.")
    parser.add_argument("--model", required=True, help="path of the GGUF file")
    parser.add_argument("--alias", required=True, help="name under which the model is served")
    parser.add_argument("--slots", type=int, required=True, help="requests generated at a time")
    parser.add_argument("--context", type=int, required=True, help="tokens of context of each slot")
    parser.add_argument("--no-cache", action="store_true", help="read every prompt anew")
    parser.add_argument("--embeddings", action="store_true", help="answer /v1/embeddings too")
    options = parser.parse_args()
    server = xllamacpp.Server(_parameters(options))
    sys.stdout.write(json.dumps({"url": server.listening_address, "slots": options.slots}) + "\n")
    sys.stdout.flush()
    sys.stdin.buffer.read()
    os._exit(0)  # the destructor would wait for streams that nobody reads


def _parameters(options: argparse.Namespace) -> xllamacpp.CommonParams:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = options.model
    parameters.model_alias = {options.alias}
    parameters.n_parallel = options.slots
    parameters.n_ctx = options.slots * options.context
    parameters.hostnames = ["127.0.0.1"]
    parameters.port = 0
    parameters.endpoint_metrics = True
    if options.no_cache:
        parameters.cache_prompt = False
        parameters.cache_ram_mib = 0
    if options.embeddings:
        parameters.embedding = True
        parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
    # llama.cpp's threads wait for each other by spinning. One thread more than there are idle cores makes
    # it 20 times slower (measured on two: 6 tokens a second instead of 135), so half the cores stay free.
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    return parameters


if __name__ == "__main__":
    main()
