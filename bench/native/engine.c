/* A paced engine: an OpenAI-compatible server whose answers cost next to nothing.
 *
 * One thread, one epoll set, HTTP/1.1 with keep-alive. Each request says what
 * it wants by fields of its JSON body, which a gateway must pass on as they are (or by
 * "user": "bench_tokens=16 bench_pace_us=20000", for those that drop fields they do not know):
 *
 *   "stream"           true: SSE in chunked framing, one HTTP chunk per event;
 *                      false or absent: one JSON body with Content-Length
 *   "stream_options"   include_usage, continuous_usage_stats: as vLLM honours them
 *   "bench_tokens"     content events of a stream [16]
 *   "bench_pace_us"    time between them; 0 = as fast as the socket takes [0]
 *   "bench_phase_us"   due times are those where (t mod pace) is this value, so
 *                      that streams stay apart whenever they were opened [-1: no]
 *   "bench_delay_us"   from the request's last byte to the first token or the
 *                      buffered answer [0]
 *   "bench_batch"      events in one write of an unpaced stream; between two writes
 *                      the engine looks after its other streams [0: about 64 KiB]
 *   "bench_head"       1: a stream's head goes out at once, as vLLM does [1];
 *                      0: with its first event
 *   "bench_bytes"      least size of a content event, or of a buffered body
 *                      [250, which is 252 with the model's usual name; 1024]
 *   "bench_id"         number under which a client's leaving is recorded [0]
 *
 * A stream is: role event, N content events (text " t" and the index in 8
 * digits), finish event, usage event when asked, [DONE]. Due times are absolute,
 * so a late wake-up does not move the later tokens.
 *
 *   GET /stats             counters
 *   GET /stats/aborts      the same and [id, closed_ns, phase, tokens] of every
 *                          answer whose client left: phase "waiting" (no token
 *                          yet), "streaming" or "buffered"; closed_ns is the
 *                          CLOCK_MONOTONIC time at which the close was read
 *   POST /reset            forget counters and aborts
 *   GET /v1/models, /health, /version: it passes for vLLM
 *
 * Usage: engine [--port N] [--limit-s N]; prints {"port": N} when it listens.
 */
#include "common.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>

enum {
    MAX_HEAD = 64 * 1024,
    MAX_BODY = 8 * 1024 * 1024,
    MAX_ANSWER = 64 * 1024 * 1024,
    BATCH = 64 * 1024,       /* bytes of a fast stream written per turn */
    SEND_BUFFER = 256 * 1024, /* bounds what a stalled reader costs the kernel */
    MAX_ABORTS = 1 << 17,
};

enum state { READING, WAITING, STREAMING, SENDING }; /* SENDING: a sized answer */


struct conn {
    int fd;
    enum state state;
    bool armed;          /* EPOLLOUT is in its interest set */
    bool stream, include_usage, continuous_usage;
    bool head_sent;
    struct buf in, out;
    int64_t id;          /* bench_id */
    int64_t due;         /* next token, or the buffered answer */
    int64_t pace, tokens;
    int64_t allowed;     /* tokens that are due by now */
    int64_t next;        /* next item: 0 role, 1..tokens content, then the ending */
    int64_t answer_bytes, batch;
    int heap_at;         /* place in the heap of due times, -1: not in it */
    char model[128];
    char *event;         /* one content event with its chunk framing */
    int event_len, text_at, total_at, completion_at;
};

struct abort_record {
    int64_t id, closed_ns;
    const char *phase;
    int64_t tokens;
};

static struct {
    int64_t connections, active, seen, completed, aborted, tokens, bytes;
} counters;
static struct abort_record *aborts;
static size_t abort_count;

static int poll_fd, timer_fd;
static int64_t timer_set_to;
static struct conn **heap;
static int heap_len, heap_cap;
static char scratch[BATCH + 4 * MAX_EVENT];

/* ---- due times: a binary heap ---------------------------------------- */

static void heap_put(int i, struct conn *c)
{
    heap[i] = c;
    c->heap_at = i;
}

static void heap_up(int i)
{
    struct conn *c = heap[i];
    while (i > 0 && heap[(i - 1) / 2]->due > c->due) {
        heap_put(i, heap[(i - 1) / 2]);
        i = (i - 1) / 2;
    }
    heap_put(i, c);
}

static void heap_down(int i)
{
    struct conn *c = heap[i];
    for (;;) {
        int child = 2 * i + 1;
        if (child >= heap_len)
            break;
        if (child + 1 < heap_len && heap[child + 1]->due < heap[child]->due)
            child++;
        if (heap[child]->due >= c->due)
            break;
        heap_put(i, heap[child]);
        i = child;
    }
    heap_put(i, c);
}

static void heap_add(struct conn *c)
{
    if (heap_len == heap_cap) {
        heap_cap = heap_cap ? 2 * heap_cap : 1024;
        heap = realloc(heap, sizeof *heap * (size_t)heap_cap);
        if (!heap)
            die("realloc");
    }
    heap_put(heap_len++, c);
    heap_up(c->heap_at);
}

static void heap_remove(struct conn *c)
{
    int i = c->heap_at;
    if (i < 0)
        return;
    c->heap_at = -1;
    struct conn *last = heap[--heap_len];
    if (last == c)
        return;
    heap_put(i, last);
    heap_up(i);
    heap_down(last->heap_at);
}

/* ---- connections ------------------------------------------------------- */

static void interest(struct conn *c, bool writable)
{
    if (c->armed == writable)
        return;
    c->armed = writable;
    struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP | (writable ? EPOLLOUT : 0u), .data.ptr = c};
    epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &e);
}

static void forget(struct conn *c)
{
    heap_remove(c);
    close(c->fd);
    buf_free(&c->in);
    buf_free(&c->out);
    free(c->event);
    free(c);
}

/* The peer closed. If an answer was on its way, that is an abort. */
static void closed(struct conn *c)
{
    if (c->state != READING) {
        int64_t content = c->next > 1 ? c->next - 1 : 0;
        if (content > c->tokens)
            content = c->tokens;
        counters.active--;
        counters.aborted++;
        if (abort_count < MAX_ABORTS)
            aborts[abort_count++] = (struct abort_record){
                c->id, now_ns(), !c->stream ? "buffered" : content ? "streaming" : "waiting", content};
    }
    forget(c);
}

static void parse_requests(struct conn *c);

static void completed(struct conn *c)
{
    counters.active--;
    counters.completed++;
    free(c->event);
    c->event = NULL;
    c->state = READING;
    interest(c, false);
}

/* False: the connection is gone and c is freed. */
static bool flush(struct conn *c)
{
    while (c->out.off < c->out.len) {
        ssize_t n = send(c->fd, c->out.p + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL);
        if (n < 0) {
            if (errno == EAGAIN)
                break;
            closed(c);
            return false;
        }
        c->out.off += (size_t)n;
        counters.bytes += n;
    }
    return true;
}

/* ---- answers ------------------------------------------------------------ */

static const char STREAM_HEAD[] = "HTTP/1.1 200 OK\r\nserver: bench\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                                  "transfer-encoding: chunked\r\n\r\n";

static int framed(char *to, const char *line, int n)
{
    int head = sprintf(to, "%x\r\n", (unsigned)n);
    memcpy(to + head, line, (size_t)n);
    memcpy(to + head + n, "\r\n", 2);
    return head + n + 2;
}

static void make_event(struct conn *c, int64_t size)
{
    char line[EVENT_ROOM + 256], frame[EVENT_ROOM + 512];
    int n = sprintf(line, "data: ");
    n += event_content(line + n, c->model, size, &c->text_at);
    c->text_at += 6;
    if (c->continuous_usage) {
        n += sprintf(line + n, ",\"usage\":{\"prompt_tokens\":9,\"total_tokens\":");
        c->total_at = n;
        n += sprintf(line + n, "        ,\"completion_tokens\":");
        c->completion_at = n;
        n += sprintf(line + n, "        }");
    }
    n += sprintf(line + n, "}\n\n");
    c->event_len = framed(frame, line, n);
    int shift = c->event_len - n - 2;
    c->text_at += shift, c->total_at += shift, c->completion_at += shift;
    c->event = malloc((size_t)c->event_len);
    if (!c->event)
        die("malloc");
    memcpy(c->event, frame, (size_t)c->event_len);
}

static int put_usage(const struct conn *c, char *to)
{
    return sprintf(to, ",\"usage\":{\"prompt_tokens\":9,\"total_tokens\":%lld,\"completion_tokens\":%lld}",
                   (long long)c->tokens + 9, (long long)c->tokens);
}

/* One item of the stream; see conn.next. */
static int put_item(struct conn *c, char *to)
{
    char line[EVENT_ROOM + 256];
    int n, length = 0;
    int64_t item = c->next++;
    if (item >= 1 && item <= c->tokens) {
        memcpy(to, c->event, (size_t)c->event_len);
        put_digits(to + c->text_at + 8, 8, item - 1, '0');
        if (c->continuous_usage) {
            put_digits(to + c->total_at + 8, 8, item + 9, ' ');
            put_digits(to + c->completion_at + 8, 8, item, ' ');
        }
        counters.tokens++;
        return c->event_len;
    }
    n = sprintf(line, "data: ");
    if (item == 0) {
        n += event_role(line + n, c->model);
        n += sprintf(line + n, "}\n\n");
        return framed(to, line, n);
    }
    n += event_finish(line + n, c->model);
    if (c->continuous_usage)
        n += put_usage(c, line + n);
    n += sprintf(line + n, "}\n\n");
    length += framed(to, line, n);
    if (c->include_usage) {
        n = sprintf(line, "data: ");
        n += event_begin(line + n, c->model);
        n += sprintf(line + n, "\"choices\":[]");
        n += put_usage(c, line + n);
        n += sprintf(line + n, "}\n\n");
        length += framed(to + length, line, n);
    }
    length += framed(to + length, "data: [DONE]\n\n", 14);
    memcpy(to + length, "0\r\n\r\n", 5);
    return length + 5;
}

/* Writes what is due, at most one batch; the rest waits for EPOLLOUT.
 * False: the connection is gone and c is freed. */
static bool pump(struct conn *c)
{
    if (!flush(c))
        return false;
    if (c->out.off < c->out.len) {
        interest(c, true);
        return true;
    }
    if (c->state == SENDING) {
        completed(c);
        return true;
    }
    int64_t due = c->allowed == c->tokens ? c->tokens + 1 : c->allowed, last = due;
    int n = 0;
    if (!c->head_sent) {
        memcpy(scratch, STREAM_HEAD, sizeof STREAM_HEAD - 1);
        n = sizeof STREAM_HEAD - 1;
        c->head_sent = true;
    }
    if (c->batch && !c->pace && last > c->next + c->batch - 1)
        last = c->next + c->batch - 1;
    while (c->next <= last && n < BATCH)
        n += put_item(c, scratch + n);
    int sent = 0;
    while (sent < n) {
        ssize_t k = send(c->fd, scratch + sent, (size_t)(n - sent), MSG_NOSIGNAL);
        if (k < 0) {
            if (errno == EAGAIN)
                break;
            closed(c);
            return false;
        }
        sent += (int)k;
        counters.bytes += k;
    }
    if (sent < n)
        buf_add(&c->out, scratch + sent, (size_t)(n - sent));
    if (sent == n && c->next > c->tokens + 1)
        completed(c);
    else
        interest(c, sent < n || c->next <= due);
    return true;
}

static void sized(struct conn *c, const char *status, const char *body, size_t n)
{
    buf_fmt(&c->out, "HTTP/1.1 %s\r\nserver: bench\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n",
            status, n);
    buf_add(&c->out, body, n);
}

static void buffered_answer(struct conn *c)
{
    struct buf body = {0};
    buf_fmt(&body,
            "{\"id\":\"chatcmpl-0123456789abcdef0123456789abcdef\",\"object\":\"chat.completion\",\"created\":1790000000,"
            "\"model\":\"%s\",\"choices\":[{\"index\":0,\"message\":{\"role\":\"assistant\",\"content\":\"", c->model);
    static const char TAIL[] = "\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
                               "\"usage\":{\"prompt_tokens\":9,\"total_tokens\":25,\"completion_tokens\":16}}";
    int64_t fill = c->answer_bytes - (int64_t)(body.len + sizeof TAIL - 1);
    if (fill > 0) {
        buf_room(&body, (size_t)fill);
        memset(body.p + body.len, 'x', (size_t)fill);
        body.len += (size_t)fill;
    }
    buf_add(&body, TAIL, sizeof TAIL - 1);
    sized(c, "200 OK", body.p, body.len);
    buf_free(&body);
    c->state = SENDING;
}

/* ---- requests ------------------------------------------------------------ */

/* The value behind "name": in a body, or behind name= in some string of it, or NULL. Enough for bodies of our
 * own client. */
static const char *field(const char *body, size_t n, const char *name)
{
    size_t length = strlen(name);
    const char *end = body + n, *at = memmem(body, n, name, length);
    if (!at) {
        at = memmem(body, n, name + 1, length - 2);
        return at && at[length - 2] == '=' ? at + length - 1 : NULL;
    }
    at += length;
    while (at < end && (*at == ' ' || *at == ':'))
        at++;
    return at < end ? at : NULL;
}

static int64_t number(const char *body, size_t n, const char *name, int64_t otherwise)
{
    const char *at = field(body, n, name);
    return at ? strtoll(at, NULL, 10) : otherwise;
}

static bool truth(const char *body, size_t n, const char *name)
{
    const char *at = field(body, n, name);
    return at && strncmp(at, "true", 4) == 0;
}

static void start_answer(struct conn *c, const char *body, size_t n)
{
    int64_t now = now_ns();
    const char *model = field(body, n, "\"model\"");
    snprintf(c->model, sizeof c->model, "bench-model");
    if (model && *model == '"') {
        size_t length = strcspn(model + 1, "\"");
        if (length < sizeof c->model) {
            memcpy(c->model, model + 1, length);
            c->model[length] = 0;
        }
    }
    c->stream = truth(body, n, "\"stream\"");
    c->include_usage = truth(body, n, "\"include_usage\"");
    c->continuous_usage = c->include_usage && truth(body, n, "\"continuous_usage_stats\"");
    c->id = number(body, n, "\"bench_id\"", 0);
    c->tokens = number(body, n, "\"bench_tokens\"", 16);
    if (c->tokens < 1)
        c->tokens = 1;
    c->pace = number(body, n, "\"bench_pace_us\"", 0) * 1000;
    c->batch = number(body, n, "\"bench_batch\"", 0);
    int64_t phase = number(body, n, "\"bench_phase_us\"", -1) * 1000;
    int64_t size = number(body, n, "\"bench_bytes\"", -1);
    c->due = now + number(body, n, "\"bench_delay_us\"", 0) * 1000;
    c->next = c->allowed = 0;
    c->head_sent = false;
    counters.seen++;
    counters.active++;
    if (!c->stream) {
        c->tokens = 0;
        c->answer_bytes = size < 0 ? 1024 : size > MAX_ANSWER ? MAX_ANSWER : size;
        if (c->due > now) {
            c->state = WAITING;
            heap_add(c);
        } else
            buffered_answer(c);
        return;
    }
    c->state = WAITING;
    make_event(c, size < 0 ? 250 : size);
    if (c->pace > 0 && phase >= 0)
        c->due += (phase - c->due % c->pace + 2 * c->pace) % c->pace;
    if (c->due > now) {
        if (number(body, n, "\"bench_head\"", 1)) {
            buf_add(&c->out, STREAM_HEAD, sizeof STREAM_HEAD - 1);
            c->head_sent = true;
        }
        heap_add(c);
        return;
    }
    c->state = STREAMING;
    c->allowed = c->pace ? 1 : c->tokens;
    if (c->allowed < c->tokens) {
        c->due += c->pace;
        heap_add(c);
    }
}

static void stats(struct conn *c, bool with_aborts)
{
    struct buf b = {0};
    buf_fmt(&b,
            "{\"connections\":%lld,\"active\":%lld,\"seen\":%lld,\"completed\":%lld,\"aborted\":%lld,"
            "\"tokens\":%lld,\"bytes\":%lld,\"cpu_ns\":%lld,\"now_ns\":%lld",
            (long long)counters.connections, (long long)counters.active, (long long)counters.seen,
            (long long)counters.completed, (long long)counters.aborted, (long long)counters.tokens,
            (long long)counters.bytes, (long long)own_cpu_ns(), (long long)now_ns());
    if (with_aborts) {
        buf_fmt(&b, ",\"aborts\":[");
        for (size_t i = 0; i < abort_count; i++)
            buf_fmt(&b, "%s[%lld,%lld,\"%s\",%lld]", i ? "," : "", (long long)aborts[i].id,
                    (long long)aborts[i].closed_ns, aborts[i].phase, (long long)aborts[i].tokens);
        buf_fmt(&b, "]");
    }
    buf_fmt(&b, "}\n");
    sized(c, "200 OK", b.p, b.len);
    buf_free(&b);
}

static void reset(void)
{
    int64_t active = counters.active;
    memset(&counters, 0, sizeof counters);
    counters.active = active;
    abort_count = 0;
}

static void answer(struct conn *c, const char *head, const char *body, size_t n)
{
    static const char MODELS[] = "{\"object\":\"list\",\"data\":[{\"id\":\"bench-model\",\"object\":\"model\","
                                 "\"created\":1790000000,\"owned_by\":\"vllm\"},"
                                 "{\"id\":\"bench/bench-model-instruct\",\"object\":\"model\","
                                 "\"created\":1790000000,\"owned_by\":\"vllm\"}]}";
    static const char NOT_FOUND[] = "{\"error\":{\"message\":\"unknown route\",\"type\":\"NotFoundError\",\"code\":404}}";
    if (!strncmp(head, "POST /v1/chat/completions ", 26))
        start_answer(c, body, n);
    else if (!strncmp(head, "GET /stats ", 11))
        stats(c, false);
    else if (!strncmp(head, "GET /stats/aborts ", 18))
        stats(c, true);
    else if (!strncmp(head, "POST /reset ", 12)) {
        reset();
        sized(c, "200 OK", "{}", 2);
    } else if (!strncmp(head, "GET /v1/models ", 15))
        sized(c, "200 OK", MODELS, sizeof MODELS - 1);
    else if (!strncmp(head, "GET /health ", 12))
        sized(c, "200 OK", "{}", 2);
    else if (!strncmp(head, "GET /version ", 13))
        sized(c, "200 OK", "{\"version\":\"0.33.0\"}", 20);
    else
        sized(c, "404 Not Found", NOT_FOUND, sizeof NOT_FOUND - 1);
}

/* Walks the chunks of a body, and joins them in place if `join`; `n` becomes its size.
 * The bytes it takes with its framing; 0: not all are here; -1: it is none (nor are trailers: nobody here sends any). */
static int64_t walk_chunks(char *body, size_t here, size_t *n, bool join)
{
    char *at = body, *end = body + here, *rest, *line;
    size_t size;
    *n = 0;
    do {
        if (!(line = memmem(at, (size_t)(end - at), "\r\n", 2)))
            return 0;
        size = strtoul(at, &rest, 16);
        if (rest == at || size > MAX_BODY)
            return -1;
        at = line + 2;
        if ((size_t)(end - at) < size + 2)
            return 0;
        if (memcmp(at + size, "\r\n", 2))
            return -1;
        if (join)
            memmove(body + *n, at, size);
        *n += size;
        at += size + 2;
    } while (size);
    return at - body;
}

/* Takes whole requests from c->in until an answer takes time. Frees c when it fails. */
static void parse_requests(struct conn *c)
{
    while (c->state == READING && c->in.off < c->in.len) {
        buf_room(&c->in, 1);
        c->in.p[c->in.len] = 0;
        char *head = c->in.p + c->in.off, *end = strstr(head, "\r\n\r\n");
        if (!end) {
            if (c->in.len - c->in.off > MAX_HEAD)
                forget(c);
            return;
        }
        *end = 0;
        const char *length = strcasestr(head, "\r\ncontent-length:");
        size_t n = length ? strtoul(length + 17, NULL, 10) : 0;
        bool chunked = strcasestr(head, "\r\ntransfer-encoding:") != NULL;
        *end = '\r';
        char *body = end + 4;
        size_t here = (size_t)(c->in.p + c->in.len - body);
        int64_t framed_size = chunked ? walk_chunks(body, here, &n, false) : (int64_t)n;
        if (framed_size < 0 || n > MAX_BODY) {
            forget(c);
            return;
        }
        if (chunked ? !framed_size : here < n)
            return;
        if (chunked)
            walk_chunks(body, here, &n, true);
        char after = body[n];
        body[n] = 0;
        answer(c, head, body, n);
        body[n] = after;
        c->in.off = (size_t)(body + framed_size - c->in.p);
        if (c->state == WAITING) {
            if (!flush(c))
                return;
        } else if (c->state == READING) {
            if (!flush(c))
                return;
            interest(c, c->out.off < c->out.len);
        } else if (!pump(c))
            return;
    }
}

static void readable(struct conn *c)
{
    static char in[64 * 1024];
    ssize_t n = recv(c->fd, in, sizeof in, 0);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
        closed(c);
        return;
    }
    if (n < 0)
        return;
    if (c->in.len - c->in.off + (size_t)n > MAX_BODY + MAX_HEAD) {
        closed(c);
        return;
    }
    buf_add(&c->in, in, (size_t)n);
    parse_requests(c);
}

static void writable(struct conn *c)
{
    if (c->state == STREAMING || c->state == SENDING) {
        if (pump(c) && c->state == READING)
            parse_requests(c);
    } else if (flush(c))
        interest(c, c->out.off < c->out.len);
}

static void run_due(void)
{
    int64_t now = now_ns();
    while (heap_len && heap[0]->due <= now) {
        struct conn *c = heap[0];
        if (!c->stream) {
            heap_remove(c);
            buffered_answer(c);
        } else {
            c->state = STREAMING;
            if (!c->pace)
                c->allowed = c->tokens;
            while (c->allowed < c->tokens && c->due <= now) {
                c->allowed++;
                c->due += c->pace;
            }
            if (c->allowed == c->tokens)
                heap_remove(c);
            else
                heap_down(0);
        }
        if (!c->armed && pump(c) && c->state == READING)
            parse_requests(c);
    }
    int64_t next = heap_len ? heap[0]->due : 0;
    if (next != timer_set_to) {
        struct itimerspec t = {.it_value = {next / SECOND, next % SECOND}};
        timerfd_settime(timer_fd, TFD_TIMER_ABSTIME, &t, NULL);
        timer_set_to = next;
    }
}

static void accept_all(int listener)
{
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0)
            return;
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct conn *c = calloc(1, sizeof *c);
        if (!c)
            die("calloc");
        c->fd = fd;
        c->heap_at = -1;
        struct epoll_event e = {.events = EPOLLIN | EPOLLRDHUP, .data.ptr = c};
        epoll_ctl(poll_fd, EPOLL_CTL_ADD, fd, &e);
        counters.connections++;
    }
}

static int listen_on(int port)
{
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1, size = SEND_BUFFER;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&a, sizeof a) || listen(fd, 4096))
        die("listen");
    socklen_t n = sizeof a;
    getsockname(fd, (struct sockaddr *)&a, &n);
    printf("{\"port\": %d}\n", ntohs(a.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv)
{
    int port = 0;
    unsigned limit_s = 3600;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--port"))
            port = atoi(argv[i + 1]);
        else if (!strcmp(argv[i], "--limit-s"))
            limit_s = (unsigned)atoi(argv[i + 1]);
        else {
            fprintf(stderr, "usage: engine [--port N] [--limit-s N]\n");
            return 2;
        }
    }
    bound_life(limit_s);
    aborts = malloc(sizeof *aborts * MAX_ABORTS);
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    timer_fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    if (!aborts || poll_fd < 0 || timer_fd < 0)
        die("start");
    int listener = listen_on(port);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = &listener};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, listener, &e);
    e.data.ptr = &timer_fd;
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, timer_fd, &e);
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poll_fd, events, 256, -1);
        if (n < 0 && errno != EINTR)
            die("epoll_wait");
        /* Due times run after the batch: they may free connections, and each
         * connection has at most one event in a batch. */
        for (int i = 0; i < n; i++) {
            if (events[i].data.ptr == &listener)
                accept_all(listener);
            else if (events[i].data.ptr == &timer_fd) {
                uint64_t expirations;
                if (read(timer_fd, &expirations, sizeof expirations) > 0)
                    timer_set_to = 0;
            } else if (events[i].events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR))
                readable(events[i].data.ptr);
            else
                writable(events[i].data.ptr);
        }
        run_due();
    }
}
