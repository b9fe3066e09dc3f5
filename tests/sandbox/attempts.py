# SPDX-License-Identifier: Apache-2.0
"""Programs that try to get out of the sandbox, or to use more of the machine than they may.

Each says ESCAPED where it succeeds, with `say`. What it aims at stands in `target`: `pid`, a process of the
same user outside; `port`, a listening socket on the loopback; `name`, an abstract socket; `secret`, a file in
a home folder, and `home`; `token`, what that file and the environment outside hold, spelt backwards.
"""

PREAMBLE = """
import ctypes, errno, mmap, os, signal, socket, struct, subprocess, sys, threading, time
target = {target!r}
libc = ctypes.CDLL(None, use_errno=True)

def say(*what):
    os.write(1, ("ESCAPED %r\\n" % (what,)).encode())

def tries(function, *arguments):
    try:
        function(*arguments)
    except (OSError, ValueError, RuntimeError, AttributeError, subprocess.SubprocessError):
        return
    say(function, arguments)

def calls(number, *arguments):  # a system call by its number on x86_64
    result = libc.syscall(number, *map(ctypes.c_long, arguments))
    if result >= 0:
        say("syscall", number, result)

def reads(path):
    try:
        content = open(path, "rb").read(1 << 20)
    except OSError:
        return
    if target["token"][::-1].encode() in content:
        say("read", path)
"""

RESOURCES = {
    "fork bomb": "for _ in range(300):\n    if os.fork() == 0: time.sleep(9)\nsay('forked')",
    "threads": """
for count in range(400):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
say("threads")""",
    "memory by allocation": "blocks = [bytearray(8 << 20) for _ in range(64)]\nsay('memory')",
    "memory by mapping": "maps = [mmap.mmap(-1, 64 << 20) for _ in range(8)]\nsay('mapped')",
    "memory by thread stacks": """
threading.stack_size(128 << 20)
for _ in range(4):
    threading.Thread(target=time.sleep, args=(9,), daemon=True).start()
say("stacks")""",
    "memory by anonymous file": "f = os.memfd_create('x')\nos.ftruncate(f, 1 << 30)\nsay('memfd')",
    "memory by pipes": """
import fcntl
for _ in range(30):
    reader, writer = os.pipe()
    fcntl.fcntl(writer, 1031, 1 << 20)
    say("pipe of a megabyte")""",
    "memory by exponent": "x = 9 ** 9 ** 9\nsay('power')",
    "large file": "f = open('x', 'wb')\nfor _ in range(64): f.write(bytes(1 << 20))\nf.flush(); say('disk')",
    "many files": "for i in range(9000):\n    open(f'{i}', 'w').close()\nsay('files')",
    "sparse file": "f = open('x', 'wb')\nos.truncate(f.fileno(), 10 << 30)\nsay('sparse')",
    "open files": "files = [os.open('/dev/null', 0) for _ in range(300)]\nsay('files')",
    "raised limits": """
import resource
for which in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    tries(resource.setrlimit, which, (1 << 40, 1 << 40))""",
}

TIME = {
    "endless loop": "while True: pass",
    "endless loop in C": "import itertools\nsum(itertools.repeat(1))",
    "endless sleep": "time.sleep(1e6)",
    "endless regular expression": "import re\nre.match('(a+)+b', 'a' * 60)",
    "deaf to signals": """
for number in range(1, 65):
    if number not in (signal.SIGKILL, signal.SIGSTOP, 32, 33):
        signal.signal(number, signal.SIG_IGN)
while True: pass""",
    "stopped": "os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(1e6)",
    "endless thread": "threading.Thread(target=time.sleep, args=(1e6,)).start()",
    "endless exit": "import atexit\natexit.register(time.sleep, 1e6)",
    "swallowed exceptions": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "endless input": "r, w = os.pipe()\nos.dup2(r, 0)\nsys.stdin.read()",
    "busy threads": """
for _ in range(8):
    threading.Thread(target=lambda: any(iter(int, 1))).start()""",
}

OUTPUT = {
    "flood of stdout": "while True: os.write(1, b'x' * 65536)",
    "flood of stderr": "while True: os.write(2, b'x' * 65536)",
    "flood of the value": "while True: os.write(3, b'x' * 65536)",
    "deep source": "exec('(' * 100000 + ')' * 100000)",
    "deep recursion": "sys.setrecursionlimit(1 << 30)\nf = lambda x: [f(y) for y in [x]]\nf(1)",
    "crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "forged report": "os.write(4, b'ended 0 0 0\\n')\nsay('wrote')",
    "inherited files": "for file in range(4, 2000): tries(os.fstat, file)",
}

FILES = {
    "home folder": "tries(os.listdir, target['home'])\ntries(os.listdir, '/home')",
    "file by its path": "reads(target['secret'])",
    "file by way of ..": "reads('../' * 30 + target['secret'].lstrip('/'))",
    "file by symbolic link": "tries(os.symlink, target['secret'], 'link')\nreads('link')",
    "file by hard link": "tries(os.link, target['secret'], 'link')\nreads('link')",
    "file by handle": """
handle = ctypes.create_string_buffer(struct.pack("Ii", 8, 1) + struct.pack("II", 2, 0))
mount = os.open("/", os.O_RDONLY | os.O_PATH)
file = libc.syscall(304, mount, handle, os.O_RDONLY)
if file >= 0: say("handle")""",
    "passwords": "tries(open, '/etc/shadow')\ntries(open, '/etc/passwd')",
    "other processes' environment": """
for pid in (1, os.getppid(), target["pid"], "self", "thread-self"):
    reads(f"/proc/{pid}/environ")
    reads(f"/proc/{pid}/cmdline")""",
    "own environment": "if target['token'][::-1] in repr(os.environ): say('environment')",
    "memory of the outside": """
tries(open, f"/proc/{target['pid']}/mem", "r+b")
tries(open, "/dev/mem", "rb")""",
    "root of another process": """
for pid in (1, os.getppid(), target["pid"]):
    reads(f"/proc/{pid}/root{target['secret']}")
    reads(f"/proc/{pid}/cwd/{target['secret']}")""",
    "writing outside": """
import sysconfig
for folder in ("/", "/tmp", "/var/tmp", "/dev/shm", "/dev", "/usr/lib", "/etc", target["home"],
               sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), sys.path[-1]):
    tries(open, f"{folder}/sitecustomize.py", "w")""",
    "changing what is shown": """
tries(os.truncate, os.__file__, 0)
tries(os.open, os.__file__, os.O_RDONLY | os.O_TRUNC)
tries(os.chmod, os.__file__, 0o777)
tries(os.utime, os.__file__, (0, 0))
tries(os.unlink, os.__file__)
tries(os.utime, target["secret"], (0, 0))
tries(os.truncate, target["secret"], 0)""",
    "changing the input": """
tries(os.write, 0, b"x")
tries(os.ftruncate, 0, 0)
def write():
    with open("/dev/stdin", "r+b") as file: file.write(b"x")
tries(write)
with open(0) as file:
    if file.read() != "given": say("changed")""",
    "files of another process": """
for pid in (os.getppid(), target["pid"]):
    for file in range(20):
        tries(open, f"/proc/{pid}/fd/{file}", "rb")
    tries(os.listdir, f"/proc/{pid}/fd")""",
    "devices": """
tries(os.mknod, "disk", 0o60660, os.makedev(254, 0))
for device in ("/dev/vda", "/dev/sda", "/dev/kmsg", "/dev/tty", "/dev/fuse", "/dev/net/tun", "/dev/ptmx"):
    tries(open, device, "rb")""",
    "kernel's settings": """
tries(open, "/proc/sys/kernel/core_pattern", "w")
tries(open, "/proc/sysrq-trigger", "w")
tries(open, "/sys/kernel/uevent_helper", "w")
tries(os.listdir, "/sys/fs/cgroup")
tries(open, "/proc/kallsyms")""",
}

NETWORK = {
    "loopback": "tries(socket.create_connection, ('127.0.0.1', target['port']), 0.5)",
    "loopback by IPv6": "tries(socket.create_connection, ('::1', target['port']), 0.5)",
    "beyond": "tries(socket.create_connection, ('1.1.1.1', 53), 0.5)",
    "datagram": """
def send():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", target["port"]))
tries(send)""",
    "name lookup": "tries(socket.getaddrinfo, 'localhost.localdomain.', 80)",
    "abstract socket": """
def connect():
    socket.socket(socket.AF_UNIX).connect("\\0" + target["name"])
tries(connect)""",
    "datagram by a pair of sockets": """
pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
for address in ("\\0" + target["name"], "/run/systemd/journal/socket", "/dev/log", "/var/run/docker.sock"):
    tries(pair[0].sendto, b"x", address)
    tries(pair[0].connect, address)
tries(pair[0].sendmsg, [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", 0))])""",
    "listening": "tries(socket.create_server, ('127.0.0.1', 0))",
    "raw and netlink sockets": """
for family, kind in ((socket.AF_PACKET, socket.SOCK_RAW), (socket.AF_NETLINK, socket.SOCK_RAW),
                     (socket.AF_INET, socket.SOCK_RAW), (socket.AF_VSOCK, socket.SOCK_STREAM)):
    tries(socket.socket, family, kind)""",
    "socket by number": "calls(41, 2, 1, 0)",
    "ring of system calls": "calls(425, 8, ctypes.addressof(ctypes.create_string_buffer(256)))",
}

PROCESSES = {
    "killing the parent": "tries(os.kill, os.getppid(), 9)\ntime.sleep(0.2)",
    "killing the outside": "tries(os.kill, target['pid'], 9)",
    "killing everybody": "tries(os.kill, -1, 9)",
    "killing the group": "tries(os.killpg, 0, 9)\ntries(os.kill, 0, 9)",
    "leaving the group": "tries(os.setsid)\ntries(os.setpgid, 0, 0)",
    "queued signal": "calls(129, target['pid'], 9, ctypes.addressof(ctypes.create_string_buffer(128)))",
    "signal by way of a file": """
import fcntl
reader, writer = os.pipe()
tries(fcntl.fcntl, reader, fcntl.F_SETOWN, target["pid"])
tries(fcntl.fcntl, reader, 10, 9)  # F_SETSIG""",
    "signal by a process file": "tries(os.pidfd_open, target['pid'])",
    "tracing": """
for pid in (1, os.getppid(), target["pid"]):
    if libc.ptrace(16, pid, 0, 0) == 0: say("attached", pid)
if libc.ptrace(0, 0, 0, 0) == 0: say("traced")""",
    "reading memory": """
buffer = ctypes.create_string_buffer(64)
vector = struct.pack("QQ", ctypes.addressof(buffer), 64)
for pid in (1, os.getppid(), target["pid"]):
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) > 0: say("memory of", pid)""",
    "limits of the outside": """
import resource
tries(resource.prlimit, target["pid"], resource.RLIMIT_NOFILE, (3, 3))
tries(resource.prlimit, os.getppid(), resource.RLIMIT_NOFILE, (3, 3))""",
    "priority of the outside": "tries(os.setpriority, os.PRIO_PROCESS, target['pid'], 19)",
    "processors of the outside": "tries(os.sched_setaffinity, target['pid'], {0})",
    "executing a shell": "tries(os.execv, '/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "executing by subprocess": "tries(subprocess.run, ['/bin/sh', '-c', 'echo ESCAPED'])",
    "executing Python": "tries(os.execv, sys.executable, ['python', '-c', 'print(\"ESCAPED\")'])",
    "executing by system": "if os.system('echo ESCAPED') == 0: say('system')",
    "executing by posix_spawn": "tries(os.posix_spawn, '/bin/true', ['true'], {})",
    "executing by libc": "if libc.system(b'echo ESCAPED') == 0: say('system')",
    "executing by number": """
libc.syscall(59, b"/bin/true", None, None)
libc.syscall(322, 3, b"", None, None, 0x1000)""",
    "executing from memory": "tries(os.execv, os.memfd_create('x'), ['x'])",
    "forking by number": "calls(57)\ncalls(56, 17, 0, 0, 0, 0)\ncalls(435, 0, 88)",
    "shared memory": "calls(29, 0, 1 << 20, 0o1777)\ncalls(30, 0, 0, 0)\ncalls(68, 1, 0o1777)",
    "message queue": "calls(240, ctypes.addressof(ctypes.create_string_buffer(b'x')), 0o102, 0o777, 0)",
}

PRIVILEGES = {
    "becoming the superuser": """
for function in (os.setuid, os.setgid, os.seteuid): tries(function, 0)
tries(os.setresuid, 0, 0, 0)
tries(os.setgroups, [0])
if os.getuid() == 0: say("superuser")""",
    "changing the root": "tries(os.chroot, '/')\ntries(os.chroot, '.')",
    "mounting": """
for kind in (b"proc", b"tmpfs", b"sysfs"):
    if libc.mount(b"x", b"/dev", kind, 0, None) == 0: say("mounted", kind)
if libc.mount(None, b"/", None, 32, None) == 0: say("writable")
if libc.umount2(b"/dev/null", 2) == 0: say("unmounted")""",
    "new namespaces": "calls(272, 0x10000000)\ncalls(272, 0x20000)\ncalls(56, 0x10000011, 0, 0, 0, 0)",
    "other namespaces": """
for kind in ("user", "mnt", "net", "pid"):
    tries(os.open, f"/proc/1/ns/{kind}", os.O_RDONLY)
calls(308, 0, 0)""",
    "capabilities": """
header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
data = ctypes.create_string_buffer(struct.pack("6I", *(0xFFFFFFFF,) * 6))
calls(126, ctypes.addressof(header), ctypes.addressof(data))
calls(157, 47, 2, 21, 0, 0)""",
    "another filter": "calls(317, 1, 0, 0)\ncalls(157, 22, 2, 0)\ncalls(157, 38, 0, 0, 0, 0)",
    "outliving the parent": "calls(157, 1, 0)",
    "calls of another kind": "calls(0x40000000 | 39)\nsay('x32')",
    "calls of 32 bits": """
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("b814000000cd80c3"))  # mov eax, 20 (getpid); int 0x80; ret
pid = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
say("32 bits", pid)""",
    "programs in the kernel": "calls(321, 0, 0, 0)\ncalls(298, 0, 0, -1, -1, 0)\ncalls(323, 0)",
    "keys": "calls(248, 0, 0, 0, 0, 0)\ncalls(250, 0, -3, 1)",
    "clock and name": "tries(time.clock_settime, 0, 0)\ntries(socket.sethostname, 'x')",
    "modules and restart": "calls(175, 0, 0, 0)\ncalls(246, 0, 0, 0, 0)\ncalls(169, 0, 0, 0, 0)",
}

IMPORTS = {
    "the launcher's modules": """
import importlib
for name in ("verl", "verl.sandbox.kernel", "verl.sandbox.runner"):
    try:
        importlib.import_module(name)
    except ImportError:
        continue
    if name != "verl": say(name)""",
    "the launcher's frames": """
import gc
frame, text = sys._getframe(), repr(gc.get_objects())
while frame:
    text += repr(frame.f_locals) + repr(frame.f_globals)
    frame = frame.f_back
if target["token"][::-1] in text: say("frames")""",
    "a module in the folder": """
tries(open, sys.path[0] + "/json.py", "w")
sys.path.insert(0, target["home"])
reads(target["home"] + "/__init__.py")""",
}

ATTEMPTS = {
    name: source
    for group in (RESOURCES, TIME, OUTPUT, FILES, NETWORK, PROCESSES, PRIVILEGES, IMPORTS)
    for name, source in group.items()
}
SEVERAL_PROCESSES = {  # with `Limits.processes` above one
    "fork bomb": RESOURCES["fork bomb"],
    "bomb that answers": """
def bomb():
    while True:
        try:
            os.fork()
        except OSError: pass
bomb()""",
    "orphans": """
if os.fork() == 0:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(1)
    os._exit(0)
os.wait()""",
    "killing process 1": """
for number in (9, 2, 15, 19, 10):
    try:
        os.kill(1, number)
    except OSError: pass
time.sleep(0.2)
os.kill(os.getpid(), 19)""",
    "killing everybody": "os.kill(-1, 9)",
    "killing the outside": "tries(os.kill, target['pid'], 9)",
    "new namespaces": PRIVILEGES["new namespaces"],
}


def program(source: str, target: dict) -> str:
    """The source of an attempt, whole."""
    return PREAMBLE.replace("{target!r}", repr(target)) + source
