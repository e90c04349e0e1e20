"""What a streamed token costs the server, without a model: 256 streams from a scripted device over real sockets.

    python tests/bench/path.py [--streams 256] [--tokens 512] [--requests 512] [--step-ms 1] [--max-joined-steps 1]

Starts ``scripted_server.py`` and drives it with ``loadgen`` in another process. As many steps' tokens are joined into
one event as the server's default has it; with ``--max-joined-steps 1``, every token is an event.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--step-ms", type=float, default=1.0)
    parser.add_argument("--policy", default="overlap")
    parser.add_argument("--max-joined-steps", help="as the server's option; its default unless given")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    server = subprocess.Popen(
        [
            sys.executable, ROOT / "tests/bench/scripted_server.py", "--step-ms", str(arguments.step_ms),
            "--policy", arguments.policy, "--max-num-seqs", str(arguments.streams),
            *(["--max-joined-steps", arguments.max_joined_steps] if arguments.max_joined_steps else []),
        ],
        stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "loadgen.json"
            subprocess.run(
                [
                    sys.executable, "-m", "loadgen", "run", "--base-url", url, "--model", "scripted",
                    "--concurrency", str(arguments.streams), "--num-requests", str(arguments.requests),
                    "--max-tokens", str(arguments.tokens), "--words", "16", "--ignore-eos", "--json", str(result),
                ],
                check=True, cwd=ROOT, env=environment,
            )  # fmt: skip
            client = json.loads(result.read_text())
        server.send_signal(signal.SIGTERM)
        report = json.loads(server.communicate(timeout=20)[0].splitlines()[-1])
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    sys.stdout.write(json.dumps(report, indent=2) + "\n")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"server": report, "client": client.get("summary", client)}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
