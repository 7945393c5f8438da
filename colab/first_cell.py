# @title Install kvjax, and check what it runs on
import importlib.metadata as metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

# Where kvjax comes from: a wheel, kvjax.zip or a folder, by its path, or an address such as "git+https://HOST/kvjax".
# Empty: kvjax-*.whl, kvjax.zip or a folder kvjax beside this notebook, or the clone that the notebook is in.
SOURCE = ""

EXTRAS = {"gpu": "cuda", "tpu": "tpu"}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
NAMES = {"gpu": "an NVIDIA GPU", "tpu": "a TPU"}


def accelerator():
    """What this machine has, whatever JAX is installed: "gpu", "tpu" or "cpu"."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return "cpu"
    if shutil.which("nvidia-smi") and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0:
        return "gpu"
    told = any(name in os.environ for name in ("TPU_ACCELERATOR_TYPE", "COLAB_TPU_ADDR", "TPU_NAME"))
    return "tpu" if told or os.environ.get("PJRT_DEVICE") == "TPU" or Path("/dev/accel0").exists() else "cpu"


def source():
    """The address that pip installs kvjax from."""
    if "://" in SOURCE:
        return SOURCE
    wheels = sorted(Path().glob("kvjax-*.whl"), key=lambda path: path.stat().st_mtime, reverse=True)
    for path in [Path(SOURCE)] if SOURCE else [*wheels, Path("kvjax.zip"), Path("kvjax"), Path("..")]:
        if path.is_file() or (path / "pyproject.toml").is_file():
            return path.resolve().as_uri()
    where = f"at {SOURCE}" if SOURCE else "beside this notebook"
    raise FileNotFoundError(f"kvjax is not {where}: upload its wheel or kvjax.zip, or set SOURCE, as said above.")


def unmet(name, extras):
    """What a package and its extras ask for and what is not installed so; of jax, jaxlib and its plugin above all."""
    try:
        from packaging.requirements import Requirement
    except ImportError:
        from pip._vendor.packaging.requirements import Requirement
    for text in metadata.requires(name) or ():
        asked = Requirement(text)
        if asked.marker and not any(asked.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        try:
            there = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            yield f"{asked.name} is missing"
            continue
        if not asked.specifier.contains(there, prereleases=True):
            yield f"{asked.name} is {there}, and {name} needs {asked.specifier}"
        if asked.name == "jax" or asked.extras:
            yield from unmet(asked.name, asked.extras)


def problems(kind):
    """Why kvjax has to be installed, or installed anew; nothing where it is ready."""
    if getattr(importlib.util.find_spec("kvjax"), "origin", None) is None:
        return ["kvjax is not installed"]
    try:
        return list(unmet("kvjax", {"eval", "batch", EXTRAS.get(kind, "")}))
    except metadata.PackageNotFoundError:
        return ["kvjax is a folder here, and not installed"]


def pip(*arguments):
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
        raise RuntimeError(f"pip {' '.join(arguments)} failed:\n{said}")


def versions():
    """The version of everything that is installed, by name."""
    importlib.invalidate_caches()
    return {found.metadata["Name"].lower(): found.version for found in metadata.distributions()}


def install(kind):
    """Install kvjax for this accelerator, with JAX and its plugin of one version; the names of what has changed."""
    before = versions()
    extras = ",".join(filter(None, [EXTRAS.get(kind), "eval", "batch"]))
    pip("install", "-q", f"kvjax[{extras}] @ {source()}")
    now = versions()
    # A plugin of another version, for an accelerator that is not here, would only be in JAX's way.
    stale = [name for name in PLUGINS if name in now and now[name] != now.get("jaxlib")]
    if stale:
        pip("uninstall", "-q", "-y", *stale)
    return {name for name, version in versions().items() if before.get(name) not in (None, version)} | set(stale)


def must_restart(changed):
    """Whether this process has already imported something that was replaced."""
    held = {module.partition(".")[0] for module in list(sys.modules)}
    owners = metadata.packages_distributions()
    return any(owner.lower() in changed for module in held for owner in owners.get(module, ()))


def restart():
    print("JAX was replaced. The runtime restarts; run this cell again, and then the others.")
    from IPython import Application

    Application.instance().kernel.do_shutdown(True)


def check(kind):
    """Say what JAX computes on, or in one sentence why that is not what this machine has."""
    import jax

    try:
        devices = jax.devices()
    except RuntimeError as error:
        raise RuntimeError(f"JAX {jax.__version__} cannot start its devices: {str(error).splitlines()[0]}") from error
    found = devices[0]
    if kind in EXTRAS and found.platform != kind:
        raise RuntimeError(
            f"This machine has {NAMES[kind]}, and JAX {jax.__version__} computes on {found.platform}: restart the "
            "runtime and run this cell again, or choose a runtime without an accelerator."
        )
    print(f"kvjax {metadata.version('kvjax')}, JAX {jax.__version__}, on {len(devices)} x {found.device_kind}")


def prepare():
    kind = accelerator()
    if problems(kind):
        print("Installing kvjax and what it needs; this may take some minutes.", flush=True)
        changed = install(kind)
        left = problems(kind)
        if left:
            raise RuntimeError(f"After installing kvjax: {'; '.join(left)}.")
        if must_restart(changed):
            return restart()
    check(kind)


prepare()
