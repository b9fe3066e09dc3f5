# SPDX-License-Identifier: Apache-2.0
"""Functions that fail each in its way, for the files of tools and environments that tests write."""

WAYS_TO_FAIL = """
def hang():
    time.sleep(1000)

def spin():
    while True:
        pass

def complain():
    raise ValueError("bad day " * 100_000)

def leave():
    os._exit(3)

def crash():
    os.kill(os.getpid(), signal.SIGSEGV)

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def exit_politely():
    sys.exit("bye")

def fill_memory():
    data = []
    while True:
        data.append(bytearray(1 << 28))

def thing():
    return object()

def long():
    return "a" * 5_000_000 + "MIDDLE" + "z" * 5_000_000
"""
