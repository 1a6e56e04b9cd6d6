# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh, from the root of the checkout:
#
#   setup_environment EXTRA...     installs the checkout with these extras of pyproject.toml
#
# Afterwards $PYTHON is the interpreter to use and its folder stands first on PATH. The environment
# is the active one if it has Python >= 3.12, else .venv in the checkout, which is made if missing.
# The first run leaves a stamp (a hash of pyproject.toml, setup.py and the interpreter); a second
# run finds it and installs nothing. Every failure prints one message and exits with code 2.

CHECKOUT=$PWD
MADE_HERE=$CHECKOUT/.venv/.megatron-sparse-made

say() {
  printf '[%4d s] %s\n' "$SECONDS" "$*"
}

# fail WHAT EXPECTED GOT REMEDY
fail() {
  printf 'error: %s\n  expected: %s\n  got:      %s\n  remedy:   %s\n' "$@" >&2
  exit 2
}

# Runs a command with its output in a log. Shows its running time and its last action: on a terminal
# in place, elsewhere as a line every 20 seconds.
#   logged LABEL LOG COMMAND...
# Returns the command's exit code.
logged() {
  local label=$1 log=$2 begin=$SECONDS shown=$SECONDS code=0 doing
  shift 2
  say "$label"
  "$@" >>"$log" 2>&1 </dev/null &
  local child=$!
  # A background job of a script ignores Ctrl-C, so pass the signal on.
  trap 'kill "$child" 2>/dev/null; exit 130' INT TERM
  while kill -0 "$child" 2>/dev/null; do
    sleep 0.2
    doing=$(grep -E '^ *(Collecting|Downloading|Using cached|Installing|Building|Preparing|Running)' \
      "$log" | tail -n 1 | cut -c 1-64) || doing=""
    if [ -t 1 ]; then
      printf '\r\033[K         %3d s  %s' $((SECONDS - begin)) "$doing"
    elif [ $((SECONDS - shown)) -ge 20 ]; then
      shown=$SECONDS
      say "  ... $doing"
    fi
  done
  wait "$child" || code=$?
  trap - INT TERM
  if [ -t 1 ]; then printf '\r\033[K'; fi
  return "$code"
}

# Succeeds if an interpreter can be used; otherwise prints the reason. It runs the interpreter, for
# a pyenv shim called python3.12 exists on PATH even if that version is not enabled.
#   fits PYTHON MODULE...
fits() {
  local python=$1 answer
  shift
  answer=$("$python" -c '
import importlib, sys
if sys.version_info < (3, 12):
    sys.exit("is Python " + sys.version.split()[0])
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError:
        sys.exit("lacks the module " + name)
' "$@" 2>&1) && return 0
  printf '%s' "$answer" | head -n 1 | cut -c 1-100
  return 1
}

# Sets BASE_PYTHON to the first interpreter that can make an environment. TRIED collects the
# rejected interpreters, each with the reason.
find_base_python() {
  local candidate path reason
  local -a candidates=()
  for candidate in python3.12 python3.13 python3.14 python3; do
    if path=$(command -v "$candidate"); then candidates+=("$path"); fi
  done
  for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python3; do
    if [ -x "$path" ]; then candidates+=("$path"); fi
  done
  if command -v uv >/dev/null && path=$(uv python find --no-python-downloads '>=3.12' 2>/dev/null); then
    candidates+=("$path")
  fi
  for candidate in "${candidates[@]}"; do
    if reason=$(fits "$candidate" venv ensurepip); then
      BASE_PYTHON=$candidate
      return 0
    fi
    TRIED+="${TRIED:+; }$candidate: $reason"
  done
  return 1
}

# Sets PYTHON: the active environment's interpreter, or that of .venv, which is made if missing.
find_environment() {
  local active=${VIRTUAL_ENV:-} reason
  # conda's base environment serves all of the user's projects, so nothing is installed there.
  if [ -z "$active" ] && [ "${CONDA_DEFAULT_ENV:-base}" != base ]; then active=${CONDA_PREFIX:-}; fi
  TRIED=""
  if [ -n "$active" ]; then
    if reason=$(fits "$active/bin/python" pip); then
      PYTHON=$active/bin/python
      say "environment: $active (the active one)"
      return
    fi
    say "the active environment $active is not used: it $reason"
    TRIED="$active: $reason"
  fi
  PYTHON=$CHECKOUT/.venv/bin/python
  if [ -e "$CHECKOUT/.venv" ]; then
    if reason=$(fits "$PYTHON" pip); then
      say "environment: .venv"
      return
    fi
    # Remove only an environment that this script made; it may have been interrupted while doing so.
    if [ ! -e "$MADE_HERE" ]; then
      fail ".venv cannot be used, and these scripts did not make it" \
        "Python >= 3.12 with pip in .venv" "it $reason" \
        "remove .venv, or activate an environment with Python >= 3.12 and pip, then run this again"
    fi
    say ".venv is made anew: it $reason"
    rm -rf "$CHECKOUT/.venv"
  fi
  if find_base_python; then
    say "environment: .venv, made with $BASE_PYTHON"
    mkdir "$CHECKOUT/.venv"
    : >"$MADE_HERE"
    "$BASE_PYTHON" -m venv "$CHECKOUT/.venv"
  elif command -v uv >/dev/null && uv venv --quiet --seed --python '>=3.12' "$CHECKOUT/.venv"; then
    : >"$MADE_HERE"
    say "environment: .venv, made by uv"
  else
    fail "no usable Python was found" \
      "Python >= 3.12 with venv and pip: an active environment, on PATH, under pyenv, or by uv" \
      "${TRIED:-no Python at all}" \
      "install Python 3.12 or newer (apt-get install python3.12-venv, pyenv install 3.12, or uv)"
  fi
}

# Prints the plan, one item a line:
#   - the stamp's key
#   - the environment's folder
#   - the extras to install; empty if all are installed
#   - then the requirements of the build: its build tools, torch (for headers and libraries) and, for
#     the extra `cuda`, nvcc. The extra brings nvcc itself, but too late for the build.
#   installation_plan EXTRA...
installation_plan() {
  "$PYTHON" - "$CHECKOUT" "$@" <<'PY'
import hashlib, importlib.metadata, pathlib, re, sys, tomllib

checkout, wanted = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
files = [checkout / "pyproject.toml", checkout / "setup.py"]
parts = [str(checkout), sys.prefix, sys.version, *(p.read_text() for p in files if p.is_file())]
key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
stamp = pathlib.Path(sys.prefix, ".megatron-sparse-installed")
found, *have = stamp.read_text().split() if stamp.is_file() else [""]
try:
    importlib.metadata.version("megatron-sparse")
except importlib.metadata.PackageNotFoundError:
    found = ""
have = set(have) if found == key else set()
if "dev" in have:
    have.add("train")  # dev names it among its own requirements
print(key, sys.prefix, ",".join(sorted(have | wanted)) if wanted - have else "", sep="\n")

project = tomllib.loads((checkout / "pyproject.toml").read_text())
torch = [r for r in project["project"]["dependencies"] if re.match(r"torch\b", r)]
nvcc = project["project"]["optional-dependencies"]["cuda"] if "cuda" in wanted else []
print(*project["build-system"]["requires"], "wheel", *torch, *nvcc, sep="\n")
PY
}

# install LABEL LOG PIP-ARGUMENT...
install() {
  local label=$1 log=$2
  shift 2
  if ! logged "$label" "$log" "$PYTHON" -m pip install --no-input --progress-bar off "$@"; then
    printf '%s\n' "--- the end of $log" >&2
    tail -n 20 "$log" >&2
    fail "pip could not install the requirements" \
      "pip install $*" "the lines above" \
      "see $log; check the network, pip's index and the free disk (8 GB), then run this again"
  fi
}

setup_environment() {
  find_environment
  local -a plan
  mapfile -t plan < <(installation_plan "$@")
  if [ "${#plan[@]}" -lt 4 ]; then
    fail "pyproject.toml cannot be read" "the checkout's own pyproject.toml" "the message above" \
      "restore it: git checkout pyproject.toml"
  fi
  local key=${plan[0]} prefix=${plan[1]} extras=${plan[2]}
  export PATH="$prefix/bin:$PATH" VIRTUAL_ENV="$prefix"
  if [ -z "$extras" ]; then
    say "everything is installed already"
    return
  fi
  local stamp=$prefix/.megatron-sparse-installed log=$prefix/megatron-sparse-install.log
  rm -f "$stamp" "$log"
  install "installing torch and the build tools (up to 5 GB; some minutes)" "$log" "${plan[@]:3}"
  install "installing megatron_sparse with $extras" "$log" --no-build-isolation -e ".[$extras]"
  printf '%s %s\n' "$key" "${extras//,/ }" >"$stamp"
  say "installed"
}
