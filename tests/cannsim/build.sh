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
flags=(-std=c++17 -fPIC -Wall -Wextra -Werror -I"$here" -isystem "$headers")

# As many compilers at a time as there are processors, the largest sources first. Only operators are worth optimising.
# xargs runs them in the foreground: a compiler in this shell's background would not hear Ctrl-C. 255 ends it at once.
objects_runtime=()
objects_operators=()
arguments=()
while read -r source; do
  object=$work/$(basename "$source" .cpp).o
  case ${source##*/} in
    op*)
      objects_operators+=("$object")
      level=-O2
      ;;
    *)
      objects_runtime+=("$object")
      level=-O1
      ;;
  esac
  arguments+=("$level" "${user_flags[@]+"${user_flags[@]}"}" -c "$source" -o "$object")
done < <(stat -c '%s %n' "$here"/*.cpp | sort -rn | cut -d ' ' -f 2-)
printf '%s\0' "${arguments[@]}" | xargs -0 -P "$(nproc)" -n "$((5 + ${#user_flags[@]}))" \
  sh -c '"$@" || exit 255' sh "$cxx" "${flags[@]}"

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
"$cxx" -x c -O1 -fPIC -Wall -Wextra -Werror -c "$work/stubs.c" -o "$work/stubs.o"

# Operators that this wheel knows and that are not simulated refuse by name. A missing one would send torch_npu on its
# old way to run an operator, which often ends in wrong data. Two kinds stay missing, since torch_npu then takes a way
# that is right: a later version of an operator that is simulated, and operators on lists of tensors, which it replaces
# by operators on the single ones.
touch "$work/simulated"
if [ ${#objects_operators[@]} -gt 0 ]; then
  nm --defined-only "${objects_operators[@]}" | awk 'NF == 3 {print $3}' >"$work/simulated"
fi
"$python" -c '
import re, sys
simulated = set(open(sys.argv[1]).read().split())
wanted = set()
for path in sys.argv[2:]:
    with open(path, "rb") as file:
        data = file.read()
    for end in re.finditer(rb"GetWorkspaceSize\0", data):
        wanted.update(re.findall(rb"\baclnn\w+$", data[end.start() - 100 : end.start()]))
print("int cannsim_refuse_operator(const char *name);")
for name in sorted(name.decode() for name in wanted):
    base, version = re.fullmatch(r"(\w+?)(?:V([2-9]))?", name).groups()
    older = [base] + [f"{base}V{number}" for number in range(2, int(version or 2))]
    if name in simulated or name.startswith("aclnnForeach") or (version and simulated.intersection(older)):
        continue
    for function in (name + "GetWorkspaceSize", name):
        print(f"int {function}(void) {{ return cannsim_refuse_operator(\"{function}\"); }}")
' "$work/simulated" "${libraries[@]}" >"$work/refusals.c"
"$cxx" -x c -O1 -fPIC -Wall -Wextra -Werror -c "$work/refusals.c" -o "$work/refusals.o"

link() {  # NAME OBJECT...
  local name=$1
  shift
  "$cxx" -shared -pthread -Wl,-soname,"$name" -Wl,-rpath,"\$ORIGIN" -Wl,--no-undefined -o "$work/$name" "$@"
}
link libascendcl.so "${objects_runtime[@]}" "$work/stubs.o"
runtime=("-Wl,--no-as-needed" "$work/libascendcl.so")
link libopapi.so "${objects_operators[@]+"${objects_operators[@]}"}" "$work/refusals.o" "${runtime[@]}"
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
