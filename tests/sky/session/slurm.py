"""A real Slurm on this machine: munged, slurmctld, four slurmd and an sshd, all on loopback.

Everything runs below one process in mount and PID namespaces of its own. The node names and the user that jobs run as
exist there only (copies of /etc/hosts, passwd, group and shadow, bound over the real ones), and ending that process
ends everything, whatever it started. Needs root and the packages of `PACKAGES`.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path

from infra import ports
from infra.processes import tail
from tests.conftest import PATIENCE

PACKAGES = ("slurm-wlm", "munge", "openssh-server", "rsync", "socat")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sshd", "rsync", "socat", "unshare", "scancel", "uv")
NAME = "loopback"
PARTITION = "main"
USER = "sprawlsky"
UID = 64999
FIRST_PORT = 18400
START_S = 60.0 * PATIENCE


def missing() -> str | None:
    """Why no Slurm can run here, in one line; None when it can."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        packages = f"apt-get install --no-install-recommends {' '.join(PACKAGES)}; pip install uv"
        return f"not installed: {', '.join(absent)} ({packages})"
    if os.geteuid() != 0:
        return f"Slurm's daemons need root, and this is {getpass.getuser()}"
    return None


def _program(name: str) -> str | None:
    import sys

    beside = Path(sys.executable).parent
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin", str(beside))))


@dataclass
class Slurm:
    """`root`: a directory that any user may enter. `cpus` and `memory_mb` are what each node claims to have."""

    root: Path
    python: Path  # interpreter that SkyPilot's own runtime on the nodes is made from
    shown: tuple[Path, ...] = ()  # directories that jobs need, also where only root may enter the way to them
    nodes: int = 4
    cpus: int = 8
    memory_mb: int = 8000
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def home(self) -> Path:
        """Home directory of the user that jobs run as, shared by all nodes."""
        return self.root / "home"

    @property
    def key(self) -> Path:
        """Private key that logs in as that user."""
        return self.root / "id_ed25519"

    @property
    def ssh_config(self) -> str:
        """The stanza for ~/.slurm/config."""
        return textwrap.dedent(f"""\
            Host {NAME}
              HostName 127.0.0.1
              Port {self.port}
              User {USER}
              IdentityFile {self.key}
            """)

    def start(self) -> None:
        """Start everything and wait until all nodes are idle. Raises RuntimeError with the end of the logs."""
        self.port = ports.next_free(FIRST_PORT)
        self._write_files()
        with (self.root / "log" / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", self.root / "start.sh"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_S
        while self.idle() < self.nodes:
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError(f"Slurm did not start\n{self.logs()}")
            time.sleep(0.5)

    def stop(self) -> None:
        """End every process of it. Files stay."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # --kill-child: the first process of the PID namespace goes, and with it all of them
            process.wait()

    def idle(self) -> int:
        """How many nodes wait for work."""
        answer = self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return len(answer.split())

    def jobs(self) -> dict[str, str]:
        """Slurm job id by job name, of jobs that hold or wait for nodes."""
        lines = self.run("squeue", "-h", "-t", "PENDING,RUNNING", "-o", "%i %j").splitlines()
        return {name: number for number, name in (line.split(None, 1) for line in lines)}

    def cancel(self, number: str) -> None:
        """Take a job's nodes away: what a preemption does."""
        self.run("scancel", number)

    def run(self, *argv: str) -> str:
        """A Slurm command; empty when it fails (the controller may not answer yet)."""
        env = os.environ | {"SLURM_CONF": str(self.root / "slurm.conf")}
        return subprocess.run(argv, env=env, capture_output=True, text=True).stdout

    def logs(self) -> str:
        return "\n".join(f"--- {path.name}\n{tail(path)}" for path in sorted((self.root / "log").glob("*")))

    # -- files

    def _write_files(self) -> None:
        for name in ("home", "home/.ssh", "log", "run", "state", "munge", "cache"):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self._write_keys()
        self._write_accounts()
        self._write_slurm()
        (self.root / "sshd_config").write_text(
            textwrap.dedent(f"""\
                Port {self.port}
                ListenAddress 127.0.0.1
                HostKey {self.root}/host_key
                PidFile {self.root}/run/sshd.pid
                AuthorizedKeysFile {self.home}/.ssh/authorized_keys
                PasswordAuthentication no
                UsePAM no
                StrictModes no
                MaxStartups 100
                MaxSessions 100
                SetEnv SLURM_CONF={self.root}/slurm.conf
                Subsystem sftp internal-sftp
                """)
        )
        (self.root / "start.sh").write_text(self._start_script())
        for name in ("munge", "run", "state", "log"):
            (self.root / name).chmod(0o755)
        subprocess.run(["chown", "-R", f"{UID}:{UID}", self.home, self.root / "cache"], check=True)
        (self.home / ".ssh").chmod(0o700)
        subprocess.run(["chown", "-R", "munge:munge", self.root / "munge"], check=True)

    def _write_keys(self) -> None:
        for path in (self.key, self.root / "host_key"):
            path.unlink(missing_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
        (self.home / ".ssh" / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        key = self.root / "munge" / "key"
        key.unlink(missing_ok=True)
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)

    def _write_accounts(self) -> None:
        added = {
            "hosts": "".join(f"127.0.0.1{n} n{n}\n" for n in range(1, self.nodes + 1)) + "127.0.0.1 login\n",
            "passwd": f"{USER}:x:{UID}:{UID}::{self.home}:/bin/bash\n",
            "group": f"{USER}:x:{UID}:\n",
            "shadow": f"{USER}:*:19000:0:99999:7:::\n",
        }
        for name, lines in added.items():
            target = self.root / "etc" / name
            target.parent.mkdir(exist_ok=True)
            target.write_text(Path("/etc", name).read_text() + lines)
            shutil.copymode(Path("/etc", name), target)

    def _write_slurm(self) -> None:
        nodes = "".join(
            f"NodeName=n{n} NodeAddr=127.0.0.1{n} Port={self.port + 10 + n} CPUs={self.cpus} "
            f"RealMemory={self.memory_mb} State=UNKNOWN\n"
            for n in range(1, self.nodes + 1)
        )
        (self.root / "slurm.conf").write_text(
            textwrap.dedent(f"""\
                ClusterName={NAME}
                SlurmctldHost=login(127.0.0.1)
                SlurmctldPort={self.port + 1}
                SlurmUser=root
                SlurmdUser=root
                AuthType=auth/munge
                AuthInfo=socket={self.root}/run/munge.socket
                CredType=cred/munge
                StateSaveLocation={self.root}/state
                SlurmdSpoolDir={self.root}/state/%n
                SlurmctldPidFile={self.root}/run/slurmctld.pid
                SlurmdPidFile={self.root}/run/%n.pid
                SlurmctldLogFile={self.root}/log/slurmctld.log
                SlurmdLogFile={self.root}/log/%n.log
                ProctrackType=proctrack/linuxproc
                TaskPlugin=task/none
                TaskProlog={self.root}/task_prolog.sh
                SelectType=select/cons_tres
                SelectTypeParameters=CR_CPU_Memory
                SlurmdParameters=config_overrides
                AccountingStorageType=accounting_storage/none
                JobAcctGatherType=jobacct_gather/none
                SchedulerParameters=sched_interval=5,bf_interval=5
                KillWait=10
                MinJobAge=60
                ReturnToService=2
                MpiDefault=none
                """)
            + nodes
            + f"PartitionName={PARTITION} Nodes=ALL Default=YES DefaultTime=00:30:00 MaxTime=01:00:00 State=UP\n"
        )
        # SkyPilot would download uv, and with it a Python, into the home that it gives each cluster. Both are here.
        uv = self.root / "uv"
        uv.write_text(
            textwrap.dedent(f"""\
                #!/bin/bash
                export UV_CACHE_DIR={self.root}/cache UV_PYTHON_DOWNLOADS=never
                export SSL_CERT_FILE="${{SSL_CERT_FILE:-/etc/ssl/certs/ca-certificates.crt}}"
                arguments=()
                for argument in "$@"; do
                  [ "$argument" = 3.10 ] && argument={self.python}
                  arguments+=("$argument")
                done
                exec {_program("uv")} "${{arguments[@]}}"
                """)
        )
        prolog = self.root / "task_prolog.sh"
        prolog.write_text(
            textwrap.dedent(f"""\
                #!/bin/sh
                place={self.home}/.sky_clusters/$SLURM_JOB_NAME/.local/bin
                mkdir -p "$place" && ln -sfn {uv} "$place/uv"
                """)
        )
        for path in (uv, prolog):
            path.chmod(0o755)

    def _show_script(self) -> str:
        """Shell lines that put a directory anybody may enter over each one that only root may, with `shown` inside."""
        closed: dict[Path, list[Path]] = {}
        for path in self.shown:
            for parent in (*reversed(path.parents), path):
                if not parent.stat().st_mode & 0o001:
                    closed.setdefault(parent, []).append(path)
                    break
        lines = []
        for number, (parent, paths) in enumerate(sorted(closed.items())):
            cover = self.root / "shown" / str(number)
            for path in paths:
                inside = cover / path.relative_to(parent)
                lines.append(f"mkdir -p {inside}\nmount --bind {path} {inside}\n")
            lines.append(f"mount --rbind {cover} {parent}\n")
        return "".join(lines)

    def _start_script(self) -> str:
        root = self.root
        binds = "\n".join(
            f"mount --bind {root}/etc/{name} /etc/{name}" for name in ("hosts", "passwd", "group", "shadow")
        )
        nodes = "\n".join(
            f"unshare --uts sh -c 'hostname n{n}; exec {_program('slurmd')} -D -f {root}/slurm.conf -N n{n}' &"
            for n in range(1, self.nodes + 1)
        )
        munged = (
            f"{_program('munged')} --foreground --force --key-file={root}/munge/key --seed-file={root}/munge/seed "
            f"--socket={root}/run/munge.socket --pid-file={root}/munge/munged.pid --log-file={root}/munge/munged.log"
        )
        return (
            f"set -e\n{self._show_script()}{binds}\nmkdir -p /run/sshd\n"
            f"chown munge {root}/run\n"
            f"setpriv --reuid=munge --regid=munge --clear-groups {munged} &\n"
            f"while [ ! -S {root}/run/munge.socket ]; do sleep 0.1; done\n"
            f"unshare --uts sh -c 'hostname login; exec {_program('slurmctld')} -D -f {root}/slurm.conf' &\n"
            f"{nodes}\n"
            f"unshare --uts sh -c 'hostname login; exec {_program('sshd')} -D -e -f {root}/sshd_config' &\n"
            f"wait\n"
        )
