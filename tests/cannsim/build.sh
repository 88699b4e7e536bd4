#!/usr/bin/env bash
# Builds the simulated CANN runtime for the torch_npu wheel of one Python interpreter.
#
#   build.sh PYTHON OUT_DIR
#
# Then run with LD_LIBRARY_PATH=OUT_DIR and OUT_DIR/bin first in PATH. A second call does nothing while the sources, the
# compiler and the wheel are the same; concurrent calls for the same OUT_DIR wait for each other.
set -euo pipefail
export LC_ALL=C

if [ $# -ne 2 ]; then
  echo "usage: $0 PYTHON OUT_DIR" >&2
  exit 2
fi
python=$1
mkdir -p "$2"
out=$(cd "$2" && pwd)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cxx=${CXX:-g++}

for tool in "$cxx" nm flock sha256sum; do
  command -v "$tool" >/dev/null || { echo "build.sh: $tool is missing" >&2; exit 1; }
done

# find_spec of a top-level name does not import it.
locate() {
  "$python" -c '
import importlib.util, os, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec is None or not spec.origin:
    sys.exit("build.sh: %s has no %s" % (sys.executable, sys.argv[1]))
print(os.path.dirname(os.path.realpath(spec.origin)))' "$1"
}
npu=$(locate torch_npu)
torch=$(locate torch)
headers=$npu/include/third_party/acl/inc
[ -f "$headers/acl/acl.h" ] || { echo "build.sh: torch_npu without ACL headers" >&2; exit 1; }

runtime_sources=()
operator_sources=()
for source in "$here"/*.cpp; do
  case ${source##*/} in
    op*) operator_sources+=("$source") ;;
    *) runtime_sources+=("$source") ;;
  esac
done

exec 9>"$out/.lock"
flock 9

stamp=$({
  "$cxx" --version | head -n 1
  echo "${CXXFLAGS:-}"
  echo "$npu"
  cat "$npu/version.py"
  stat -c '%s %Y' "$npu"/lib/*.so
  cd "$here"
  sha256sum ./*.cpp ./*.h ./npu-smi ./build.sh
} | sha256sum)
if [ -f "$out/.stamp" ] && [ "$(cat "$out/.stamp")" = "$stamp" ]; then
  exit 0
fi

work=$(mktemp -d "$out/.build.XXXXXX")
trap 'rm -rf "$work"' EXIT
rm -f "$out/.stamp"

# What this wheel wants from CANN and the sources do not define. Weak symbols, those of libc (which carry a version, but
# not in every library), of Python and of torch are somebody else's.
libraries=("$npu"/lib/libtorch_npu.so "$npu"/lib/libtensorpipe.so "$npu"/lib/libnpu_profiler.so "$npu"/_C*.so)
nm -D --undefined-only "${libraries[@]}" 2>/dev/null |
  awk '$1 == "U" && $2 !~ /@/ && $2 !~ /^_?Py/ {print $2}' | sort -u >"$work/wanted"
nm -D --defined-only "${libraries[@]}" "$torch"/lib/*.so |
  awk 'NF == 3 {sub(/@.*/, "", $3); print $3}' | sort -u >"$work/provided"
comm -23 "$work/wanted" "$work/provided" | "$python" -c '
import ctypes, sys
libc = ctypes.CDLL(None)
sys.stdout.writelines(name for name in sys.stdin if not hasattr(libc, name.strip()))' >"$work/cann"

read -ra user_flags <<<"${CXXFLAGS:-}"
flags=(-O2 -std=c++17 -fPIC -Wall -Wextra -Werror -I"$here" -isystem "$headers" "${user_flags[@]+"${user_flags[@]}"}")

# At most two compilers at a time.
objects_runtime=()
objects_operators=()
pids=()
compile() {
  "$cxx" "${flags[@]}" -c "$1" -o "$2" &
  pids+=($!)
  if [ ${#pids[@]} -ge 2 ]; then
    wait "${pids[0]}"
    pids=("${pids[@]:1}")
  fi
}
for source in "${operator_sources[@]+"${operator_sources[@]}"}"; do
  object=$work/$(basename "$source" .cpp).o
  objects_operators+=("$object")
  compile "$source" "$object"
done
for source in "${runtime_sources[@]}"; do
  object=$work/$(basename "$source" .cpp).o
  objects_runtime+=("$object")
  compile "$source" "$object"
done
for pid in "${pids[@]}"; do wait "$pid"; done

# The rest: hooks of profiling and of CANN's log do nothing; anything else is an error that names itself.
nm --defined-only "${objects_runtime[@]}" | awk 'NF == 3 {print $3}' | sort -u >"$work/defined"
{
  echo '#include <stdint.h>'
  echo 'int cannsim_unimplemented(const char *name);'
  comm -23 "$work/cann" "$work/defined" | while read -r symbol; do
    case $symbol in
      Msprof* | aclAppLog) echo "int64_t $symbol(void) { return 0; }" ;;
      *) echo "int64_t $symbol(void) { return cannsim_unimplemented(\"$symbol\"); }" ;;
    esac
  done
} >"$work/stubs.c"
"$cxx" -x c -O2 -fPIC -Wall -Wextra -Werror -c "$work/stubs.c" -o "$work/stubs.o"

link() {  # NAME OBJECT...
  local name=$1
  shift
  "$cxx" -shared -pthread -Wl,-soname,"$name" -Wl,-rpath,"\$ORIGIN" -Wl,--no-undefined -o "$work/$name" "$@"
}
link libascendcl.so "${objects_runtime[@]}" "$work/stubs.o"
runtime=("-Wl,--no-as-needed" "$work/libascendcl.so")
link libopapi.so "${objects_operators[@]+"${objects_operators[@]}"}" "${runtime[@]}"
names=(libascendcl.so libopapi.so)
for name in libhccl libacl_op_compiler libge_runner libgraph libacl_tdt_channel; do
  link "$name.so" "${runtime[@]}"
  names+=("$name.so")
done

# Renaming replaces a library that a running process still maps without touching what it maps.
for name in "${names[@]}"; do mv -f "$work/$name" "$out/$name"; done
mkdir -p "$out/bin"
install -m 755 "$here/npu-smi" "$work/npu-smi"
mv -f "$work/npu-smi" "$out/bin/npu-smi"
echo "$stamp" >"$out/.stamp.new"
mv -f "$out/.stamp.new" "$out/.stamp"
