"""Break on purpose: the n-th file operation of a piece of work is killed, half done or refused; files are flipped, cut
and swapped; two processes meet, one of them paused. The work is done in forked processes: a kill costs no import."""
import builtins
import io
import os
import random
import signal
import time
from contextlib import contextmanager
from pathlib import Path

REFUSALS = ValueError,OSError,FloatingPointError # what a command turns into a sentence
COUNTED = 'replace','rename','unlink','remove','mkdir','rmdir','fsync','utime'


class Written:
    "A file that counts what is written to it"
    def __init__(self, file, faults):
        self.file,self.faults = file,faults

    def write(self, data):
        def half():
            self.file.write(data[:len(data)//2])
            self.file.flush()
        at = os.path.abspath(self.file.name)
        self.faults.loose.setdefault(at, os.path.getsize(at))
        return self.faults.operation(lambda: self.file.write(data), half)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


class Faults:
    "Counts the operations on files below a folder, and does something at one of them"
    def __init__(self, folder, at=0, how='count'):
        self.folder,self.at,self.how,self.n = str(folder),at,how,0
        self.loose,self.moved = {},{} # files: how much of them is on the disk; names that are not: what they were

    def operation(self, do, half=None):
        self.n += 1
        if self.n!=self.at:
            return do()
        if self.how=='kill':
            os._exit(9)
        if self.how=='power':
            try:
                do()
            finally:
                self.lose()
                os._exit(9)
        if self.how=='half': # of a write the first half; of anything else all, and then no more
            try:
                (half or do)()
            finally: # a folder may have been there
                os._exit(9)
        if self.how=='refuse':
            raise OSError(28, 'No space left on device')
        if self.how=='pause':
            os.kill(os.getpid(), signal.SIGSTOP)
        return do()

    def reached(self, fd):
        "After an `fsync`: of a file its content, of a folder its names"
        at = os.readlink(f'/proc/self/fd/{fd}')
        self.loose.pop(at, None)
        self.moved = {k: v for k,v in self.moved.items() if os.path.dirname(k)!=at}

    def moving(self, a, b):
        "Before a rename"
        a,b = os.path.abspath(a),os.path.abspath(b)
        self.moved.setdefault(b, (a, Path(b).read_bytes() if os.path.isfile(b) else None))
        for was in [w for w in self.loose if w==a or w.startswith(a+'/')]:
            self.loose[b+was[len(a):]] = self.loose.pop(was)

    def lose(self):
        "The power fails: what was not brought to the disk is half there, and a name means what it meant"
        self.how = 'count' # nothing of this is the work's own
        for file,kept in self.loose.items():
            if os.path.isfile(file):
                os.truncate(file, (kept+os.path.getsize(file))//2)
        for b,(a,old) in reversed(self.moved.items()):
            if os.path.exists(b) and not os.path.exists(a):
                os.rename(b, a)
            if old is not None:
                Path(b).write_bytes(old)

    def _mine(self, where):
        return isinstance(where, int) or str(os.path.abspath(where)).startswith(self.folder)

    @contextmanager
    def __call__(self):
        plain,kept = {name: getattr(os, name) for name in COUNTED},io.open
        def counted(name):
            def f(where, *args, **kw):
                if not self._mine(where):
                    return plain[name](where, *args, **kw)
                def do():
                    if self.how=='power' and name in ('rename','replace'):
                        self.moving(where, args[0])
                    plain[name](where, *args, **kw)
                    if self.how=='power' and name=='fsync':
                        self.reached(where)
                return self.operation(do)
            return f
        def opened(where, mode='r', *args, **kw):
            if not isinstance(where, (str,os.PathLike)) or not set(mode)&set('wax+') or not self._mine(where):
                return kept(where, mode, *args, **kw)
            return Written(self.operation(lambda: kept(where, mode, *args, **kw)), self)
        for name in COUNTED:
            setattr(os, name, counted(name))
        io.open = builtins.open = opened
        try:
            yield self
        finally:
            io.open = builtins.open = kept
            for name in COUNTED:
                setattr(os, name, plain[name])


def start(work, folder, faults=None):
    "A process that does `work(folder)`; its exit status: 0 done, 2 refused, 9 killed, 1 an error that nobody expected"
    if pid := os.fork():
        return pid
    code = 1
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        with (faults or Faults(folder))() as f:
            work(folder)
        if f.how=='count' and f.at<0: # asked how many there were
            (Path(folder).parent/'operations').write_text(str(f.n))
        code = 0
    except REFUSALS:
        code = 2
    finally:
        os._exit(code)


def end(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def operations(work, folder):
    "How many file operations an unbroken `work` takes"
    assert end(start(work, folder, Faults(folder, -1)))==0
    return int((Path(folder).parent/'operations').read_text())


def damages(data, n, seed, others=()):
    "Ways to spoil a content: bits that turn over, ends that are cut off, another file in its place"
    rng = random.Random(seed)
    for i in range(n):
        kind = ('flip','cut','swap','flip','flip')[i%5]
        if kind=='swap' and others:
            yield kind,rng.choice(others)
        elif kind=='cut':
            yield kind,data[:rng.randrange(len(data))]
        else:
            at = rng.randrange(len(data))
            yield 'flip',data[:at]+bytes([data[at]^1<<rng.randrange(8)])+data[at+1:]


def pair(work, folder, at):
    "One process that pauses at its `at`-th operation, and a second one; then the first goes on. Both exit statuses"
    first = start(work, folder, Faults(folder, at, 'pause'))
    stopped = os.WIFSTOPPED(os.waitpid(first, os.WUNTRACED)[1])
    second = start(work, folder)
    done,until = None,time.time()+1.5
    while done is None and time.time()<until: # it ends, or it waits
        pid,status = os.waitpid(second, os.WNOHANG)
        done = os.waitstatus_to_exitcode(status) if pid else None
        time.sleep(.01)
    if stopped:
        os.kill(first, signal.SIGCONT)
    return end(first) if stopped else 0,end(second) if done is None else done
