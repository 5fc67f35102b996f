"""Compiled loops over atoms on the threads that torch has: a second pool of threads beside them would be in their way.

    @njit(**options)
    def _doubled(begin, end, x, out):         # the atoms begin … end - 1
        ...

    @njit(**options)
    def doubled(x, out, pool):
        spread(_doubled, len(x), (x, out), pool)

    doubled(x, out, threads(len(x)))

Every thread takes some atoms, then the next ones, until none is left. What is computed for an atom does not depend on
the number of threads.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

CHUNKS = 4  # that a thread takes on average
ENOUGH = 700  # edges: some 30 µs, several times what a thread needs that spins while it waits
I32, I64, VOID, ANY = ir.IntType(32), ir.IntType(64), ir.VoidType(), ir.IntType(8).as_pointer()
Pool = tuple[int, int]  # where GOMP_parallel is, and the number of threads


@cache
def gomp_parallel() -> int:
    """Its address in the OpenMP runtime of torch's own operations; 0 where there is none of the GNU kind."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))  # is loaded already
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0
    except (OSError, AttributeError):  # another system, or a torch of another kind
        return 0


def threads(work: int) -> Pool:
    """What loops take as `pool`: torch's threads, or one where the work (in edges, or what takes as long) is small."""
    address = gomp_parallel() if work >= ENOUGH else 0
    return address, torch.get_num_threads() if address else 1


@intrinsic
def spread(typingctx, loop, count, arguments, pool):
    """loop(begin, end, *arguments) for all ranges that together are 0 … count - 1; 0 if all went well."""
    signature = loop.get_call_type(typingctx, (types.intp, types.intp, *arguments.types), {})

    def generate(context, builder, _, values):
        compiled = loop.dispatcher.overloads[signature.args]
        context.add_linking_libs((compiled.library,))
        job_type = ir.LiteralStructType([values[2].type, I64, I64, I64, I32])  # arguments, count, chunk, next, failed
        parallel, number = (builder.extract_value(values[3], n) for n in range(2))
        chunk = builder.add(builder.sdiv(values[1], builder.mul(number, I64(CHUNKS))), I64(1))
        alone = builder.icmp_signed("<=", number, I64(1))
        job = cgutils.alloca_once(builder, job_type)
        for n, value in enumerate((values[2], values[1], builder.select(alone, values[1], chunk), I64(0), I32(0))):
            builder.store(value, builder.gep(job, [I32(0), I32(n)]))
        work = take_chunks(context, builder.module, job_type, compiled.fndesc, signature)
        job = builder.bitcast(job, ANY)
        with builder.if_else(alone) as (then, otherwise):
            with then:
                builder.call(work, [job])
            with otherwise:
                kind = ir.FunctionType(VOID, [work.type, ANY, I32, I32]).as_pointer()
                builder.call(builder.inttoptr(parallel, kind), [work, job, builder.trunc(number, I32), I32(0)])
        failed = builder.gep(builder.bitcast(job, job_type.as_pointer()), [I32(0), I32(4)])
        return builder.sext(builder.load(failed), I64)

    return types.int64(loop, count, arguments, pool), generate


def take_chunks(context, module, job_type, description, signature) -> ir.Function:
    """void work(job): while the next chunk is not beyond the end, call the loop for it. What each thread runs."""
    name = module.get_unique_name(f"chunks_of_{description.unique_name}")
    work = ir.Function(module, ir.FunctionType(VOID, [ANY]), name)
    work.linkage = "internal"
    entry, head, body, end = (work.append_basic_block(x) for x in ("entry", "head", "body", "end"))
    b = ir.IRBuilder(entry)
    job = b.bitcast(work.args[0], job_type.as_pointer())
    arguments, count, chunk, following, failed = (b.gep(job, [I32(0), I32(n)]) for n in range(5))
    arguments, count, chunk = cgutils.unpack_tuple(b, b.load(arguments)), b.load(count), b.load(chunk)
    b.branch(head)
    b.position_at_end(head)
    first = b.atomic_rmw("add", following, chunk, "monotonic")
    b.cbranch(b.icmp_signed("<", first, count), body, end)
    b.position_at_end(body)
    last = b.add(first, chunk)
    last = b.select(b.icmp_signed("<", last, count), last, count)
    status, _ = context.call_internal_no_propagate(b, description, signature, [first, last, *arguments])
    # Else there would be two copies of the loop, compiled in different surroundings and so with different rounding: the
    # one that is linked would be taken when it has just been compiled, the other when it comes from numba's cache.
    next(x for x in reversed(body.instructions) if isinstance(x, ir.CallInstr)).attributes.add("alwaysinline")
    with b.if_then(status.is_error):
        b.store(I32(1), failed)
    b.branch(head)
    b.position_at_end(end)
    b.ret_void()
    return work
