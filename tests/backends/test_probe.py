import json
import os
import subprocess
import sys

import torch


def test_the_probe_says_what_this_torch_is() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "sdamd.backends.probe"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    found = json.loads(done.stdout)
    assert (found["version"], found["hip"]) == (torch.__version__, torch.version.hip)
    assert found["device_count"] == torch.cuda.device_count() == len(found["devices"])
    assert done.stderr.splitlines()[0] == "importing torch"
