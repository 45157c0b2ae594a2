/* What the engine and the load client share: clocks, buffers, field scans. */
#ifndef BENCH_COMMON_H
#define BENCH_COMMON_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <signal.h>
#include <time.h>
#include <unistd.h>

#define MILLISECOND 1000000LL
#define SECOND 1000000000LL

/* CLOCK_MONOTONIC is one clock for the whole host: times taken by the client
 * and by the engine may be subtracted from each other. */
static inline int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

static inline int64_t own_cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

/* User + system time of another process with all its threads, dead ones too:
 * the sum that /proc/PID/stat shows in ticks of 10 ms, here in nanoseconds.
 * The clock id is what clock_getcpuclockid(3) computes. -1: no such process. */
static inline int64_t process_cpu_ns(int pid)
{
    struct timespec t;
    if (clock_gettime((clockid_t)((~(unsigned)pid << 3) | 2u), &t) != 0)
        return -1;
    return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}

static inline void die(const char *what)
{
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "failed");
    exit(2);
}

/* A growing byte buffer. Bytes [off, len) are live. */
struct buf {
    char *p;
    size_t off, len, cap;
};

static inline void buf_room(struct buf *b, size_t n)
{
    if (b->off == b->len)
        b->off = b->len = 0;
    if (b->len + n <= b->cap)
        return;
    if (b->off) {
        memmove(b->p, b->p + b->off, b->len - b->off);
        b->len -= b->off;
        b->off = 0;
    }
    if (b->len + n > b->cap) {
        size_t cap = b->cap ? b->cap : 4096;
        while (cap < b->len + n)
            cap *= 2;
        b->p = realloc(b->p, cap);
        if (!b->p)
            die("realloc");
        b->cap = cap;
    }
}

static inline void buf_add(struct buf *b, const void *p, size_t n)
{
    buf_room(b, n);
    memcpy(b->p + b->len, p, n);
    b->len += n;
}

static inline void buf_fmt(struct buf *b, const char *fmt, ...)
{
    va_list ap, again;
    va_start(ap, fmt);
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    buf_room(b, (size_t)n + 1);
    vsnprintf(b->p + b->len, (size_t)n + 1, fmt, again);
    b->len += (size_t)n;
    va_end(again);
    va_end(ap);
}

static inline void buf_free(struct buf *b)
{
    free(b->p);
    memset(b, 0, sizeof *b);
}

/* ---- the engine's events, which the client knows by heart ---- */

enum { MAX_EVENT = 16 * 1024, EVENT_ROOM = 2 * MAX_EVENT };

static inline int event_begin(char *to, const char *model)
{
    return snprintf(to, EVENT_ROOM,
                    "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion.chunk\","
                    "\"created\":1790000000,\"model\":\"%s\",", model);
}

/* What begins an answer, and what ends its choice: without what may follow the choices, and the last brace. */
static inline int event_role(char *to, const char *model)
{
    int n = event_begin(to, model);
    return n + sprintf(to + n, "\"choices\":[{\"index\":0,\"delta\":{\"role\":\"assistant\",\"content\":\"\"},"
                               "\"logprobs\":null,\"finish_reason\":null}]");
}

static inline int event_finish(char *to, const char *model)
{
    int n = event_begin(to, model);
    return n + sprintf(to + n, "\"choices\":[{\"index\":0,\"delta\":{},\"logprobs\":null,\"finish_reason\":\"stop\"}]");
}

/* One content event, the same way; `text_at`: where the 8 digits of its index belong. With `data: `, the
 * brace and a blank line it has `size` bytes, if that is enough. */
static inline int event_content(char *to, const char *model, int64_t size, int *text_at)
{
    static const char CHOICE[] = "\",\"choices\":[{\"index\":0,\"delta\":{\"content\":\" t00000000\"},"
                                 "\"logprobs\":null,\"finish_reason\":null}]";
    int n = event_begin(to, model);
    n += sprintf(to + n, "\"system_fingerprint\":\"");
    for (int fill = (int)(size > MAX_EVENT ? MAX_EVENT : size) - n - (int)(sizeof CHOICE - 1) - 9; fill > 0; fill--)
        to[n++] = 'x';
    *text_at = n + (int)(strstr(CHOICE, "00000000") - CHOICE);
    return n + sprintf(to + n, "%s", CHOICE);
}

static inline void put_digits(char *end, int width, int64_t value, char pad)
{
    for (int i = 0; i < width; i++) {
        *--end = value || i == 0 ? (char)('0' + value % 10) : pad;
        value /= 10;
    }
}

/* Ends with whoever started us, and never outlives `limit_s` seconds. */
static inline void bound_life(unsigned limit_s)
{
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    signal(SIGPIPE, SIG_IGN);
    alarm(limit_s);
    struct rlimit files;
    if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
        files.rlim_cur = files.rlim_max;
        setrlimit(RLIMIT_NOFILE, &files);
    }
}

#endif
