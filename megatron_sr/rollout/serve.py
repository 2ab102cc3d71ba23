"""Serve a vLLM engine over HTTP, on the loopback interface unless a token is given: `megatron-sr serve --model DIR`."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from pathlib import Path

from megatron_sr.rollout.server import EngineServer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the server."""
    parser.add_argument("--model", help="Hugging Face checkpoint directory")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but loopback needs --token-file (%(default)s)"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: a free one, which is printed (%(default)s)")
    parser.add_argument("--token-file", help="file with the token that requests must bring")
    parser.add_argument("--weights-directory", help="the only directory from which transport 'file' may read")
    parser.add_argument(
        "--update-timeout", type=float, default=120.0, help="seconds an update may stand still (%(default)s)"
    )
    parser.add_argument(
        "--max-model-len", type=int, default=2048, help="most tokens of prompt plus completion (%(default)s)"
    )
    parser.add_argument("--max-num-seqs", type=int, default=256, help="most sequences decoded at once (%(default)s)")
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, help="vLLM workers that share the model (%(default)s)"
    )
    parser.add_argument("--kv-cache-gib", type=int, default=1, help="KV cache on CPU (%(default)s)")
    parser.add_argument(
        "--child", action="store_true", help=argparse.SUPPRESS
    )  # settings and token on stdin, ends with it


def main(args: argparse.Namespace) -> int:
    """Serve until interrupted; the exit code."""
    if args.child:
        return _child()
    if not args.model:
        raise SystemExit("--model is needed: a Hugging Face checkpoint directory")
    token = Path(args.token_file).read_text().strip() if args.token_file else None
    options = {"max_model_len": args.max_model_len, "max_num_seqs": args.max_num_seqs}
    options |= {"tensor_parallel_size": args.tensor_parallel_size, "kv_cache_gib": args.kv_cache_gib}
    server = {"host": args.host, "port": args.port, "token": token, "weights_directory": args.weights_directory}
    EngineServer(None, **(server | {"port": 0})).close()  # refuses bad settings before the engine takes its time
    engine = _engine(args.model, options)
    serving = EngineServer(engine, **server, update_timeout=args.update_timeout).start()
    print(f"serving {args.model} at {serving.url}", flush=True)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    stop.wait()
    serving.close()
    engine.shutdown()
    return 0


def _child() -> int:
    """The child of a `SubprocessEngine`. stdin: one line of JSON, then nothing; its end means that the parent is gone.

    The last descriptor named in the settings gets one line of JSON: {"url": ...} or {"error": ..., "message": ...}.
    """
    settings = json.loads(sys.stdin.readline())
    ready = os.fdopen(settings["ready_fd"], "w")
    threading.Thread(target=_die_with_parent, daemon=True, name="parent-watch").start()
    try:
        engine = _engine(settings["model"], settings["engine"])
        server = EngineServer(engine, token=settings["token"], weights_directory=settings["weights_directory"],
                              update_timeout=settings["update_timeout"]).start()  # fmt: skip
    except BaseException as error:
        ready.write(json.dumps({"error": type(error).__name__, "message": str(error)}) + "\n")
        ready.close()
        raise
    ready.write(json.dumps({"url": server.url}) + "\n")
    ready.close()
    threading.Event().wait()
    return 0


def _die_with_parent() -> None:
    """stdin's end: end this process and vLLM's workers, which are in its process group, at once."""
    sys.stdin.read()
    os.killpg(0, signal.SIGKILL)


def _engine(model: str, options: dict):
    from megatron_sr.rollout.vllm import VLLMEngine

    return VLLMEngine(model, **options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m megatron_sr.rollout.serve", description=__doc__)
    add_arguments(parser)
    sys.exit(main(parser.parse_args()))
