"""A provider of Harbor's without containers, for tests: a folder that is a program's root.

It has this machine's programs and no image, and it keeps nobody in: a stand-in, no sandbox.
"""

import asyncio
import os
import shlex
import shutil
import tempfile
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult

_ENTER = (
    'cd "$1" || exit; for each in usr etc dev; do mount --bind "/$each" "$each" && '
    'mount -o remount,bind,ro "$each" || exit; done; mount -t proc proc proc; '
    'exec chroot "$1" /bin/bash -c "cd $2 && $3"'
)


class ChrootEnvironment(BaseEnvironment):
    @staticmethod
    def type():
        return "chroot"

    def _validate_definition(self):
        pass

    async def start(self, force_build):
        folder = os.environ.get("AGENTRL_CHROOTS")
        self._root = Path(tempfile.mkdtemp(prefix=f"{self.session_id}-", dir=folder))
        for name in ("usr", "etc", "dev", "proc", "tmp", "srv", "logs/artifacts", "opt", "root"):
            (self._root / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (self._root / name).symlink_to(f"usr/{name}")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete):
        shutil.rmtree(self._root, ignore_errors=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None):
        workdir = cwd or self.task_env_config.workdir or "/srv"
        owner = [] if os.getuid() == 0 else ["--map-root-user"]
        enter = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *owner, "bash", "-c"]
        process = await asyncio.create_subprocess_exec(
            *enter,
            _ENTER,
            "bash",
            str(self._root),
            shlex.quote(workdir),
            command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **(self._merge_env(env) or {})},
        )
        try:
            output, errors = await asyncio.wait_for(process.communicate(), timeout_sec)
        except TimeoutError:
            process.kill()
            raise
        return ExecResult(
            stdout=output.decode(errors="replace"),
            stderr=errors.decode(errors="replace"),
            return_code=process.returncode or 0,
        )

    def _inside(self, path):
        return self._root / path.lstrip("/")

    async def upload_file(self, source_path, target_path):
        shutil.copyfile(source_path, self._inside(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._inside(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copyfile(self._inside(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._inside(source_dir), target_dir, dirs_exist_ok=True)
