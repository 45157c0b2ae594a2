/* The load client: opens answers, reads them strictly or slowly, leaves them, or never reads.
 *
 * One thread, one epoll set, one JSON line on stdout. Every answer that is read is
 * checked: the HTTP message has its proper end, a stream has exactly the asked
 * content events in order, one finish, one [DONE], and nothing after it.
 *
 *   --mode stream    N streams at once, read to their end; per-token gaps
 *   --mode buffered  N keep-alive connections, R requests in all, one at a time each
 *   --mode leave     R tries, N at a time: leave at a random moment of --phase by
 *                    --how fin (close with nothing unread) | rst (SO_LINGER 0) | mix
 *   --mode hold      N streams asked for and never read; prints "ready", then holds
 *                    until --hold-ms passed or stdin ends
 *   --mode stall     N streams asked for and never read, or never acknowledged, each until the
 *                    other side ends it: when its last byte came, and when it ended
 *
 * With --rate a stream is read at so many bytes a second, with --exact every event is
 * compared with what the engine must have written. --ws 1 asks over WebSockets, one
 * for each stream, --ws 2 every second one; with --credit every second of those gives so
 * much, and acknowledges each time half of it is used up.
 *
 * CPU of the processes in --pids is read at both ends of the window, which is:
 * stream with --window-ms: from --warm-ms after every stream had its first token;
 * stream without: the whole run; buffered: after --warm requests, --requests long; --tail more are
 * asked for meanwhile, so that as many as before are under way until its end, and left then.
 * Connections show the API keys of --keys in turn, and each request has the line of --header.
 * --in-user 1: the engine's wishes go into the field "user", for gateways that drop fields they do not know.
 * --upstream: what the engine calls the model, if a gateway before it has another name for it.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { READS_A_SECOND = 10, MAX_PIDS = 64, MAX_KEYS = 64, READ = 256 * 1024, MAX_REASONS = 32, CONTENT_DIGITS = 8 };

static struct {
    const char *mode, *host, *model, *upstream, *phase, *how, *pids, *keys, *header;
    int64_t port, streams, tokens, pace_us, spread, delay_us, head, bytes, requests, warm, usage;
    int64_t ramp_us, warm_ms, window_ms, measured, tries, min_us, max_us, max_tokens, id_base;
    int64_t pause_us, rcvbuf, hold_ms, limit_s, seed, batch, vary, rate, exact, ws, credit, tail, in_user;
} opt = {
    .mode = "stream", .host = "127.0.0.1", .model = "bench-model", .phase = "streaming", .how = "fin", .pids = "",
    .keys = "", .upstream = "", .header = "", .streams = 1, .tokens = 16, .spread = 1, .head = 1, .bytes = -1, .requests = 1, .measured = -1,
    .tries = 1, .max_tokens = 1, .limit_s = 120, .seed = 1,
};

enum chunk_state { SIZE, DATA, DATA_END, TRAILER };
enum step { MORE, ENDED, BROKEN };

struct conn {
    int fd, index;
    bool live, connected;
    struct buf out, in, text; /* text: decoded body not yet scanned */
    /* the answer */
    bool has_head, chunked;
    int status;
    int64_t left;             /* of the body or of the chunk */
    enum chunk_state chunk;
    int64_t body_bytes, tokens, comments;
    int finishes, dones, errors, strays, usages;
    const char *broken;
    int64_t sent_at, first_at, last_at;
    int64_t *gaps, gap_count;
    /* leaving */
    int64_t id, leave_at, leave_tokens;
    bool by_reset;
    int64_t open_at;          /* not before this time, when not live */
    /* reading slowly */
    int64_t read_due, items;  /* events so far, the first and the last included */
    /* over a WebSocket */
    bool ws, credited, asked;
    struct buf ask;           /* what is sent once it is open */
    int64_t deltas, acked, came_at;
};

struct try_record {
    int64_t id, left_ns, tokens;
    bool by_reset;
    const char *result;
};

struct end_record {
    int64_t id, last_ns, ended_ns;
    const char *kind, *result;
};

static int poll_fd;
static struct conn *conns;
static struct { const char *what; int64_t count; } reasons[MAX_REASONS];
static int pids[MAX_PIDS], pid_count;
static struct key { const char *at; int len; } keys[MAX_KEYS]; /* of --keys, taken in turn by the connections */
static int key_count;
static int64_t cpu_before[MAX_PIDS], cpu_after[MAX_PIDS];
static int64_t started_at, window_from, window_to, own_before, own_after;
static int64_t total_tokens, tokens_before, tokens_after;
static int64_t first_tokens, finished, good, issued, leftover_bytes;
static int64_t *latencies, latency_count;
static struct try_record *tries;
static int64_t try_count;
static struct end_record *ends;
static int64_t end_count;
static char role_event[EVENT_ROOM], content_event_text[EVENT_ROOM], finish_event[EVENT_ROOM]; /* with --exact */
static int role_len, content_len, finish_len, content_digits;

static void reason(const char *what)
{
    for (int i = 0; i < MAX_REASONS; i++) {
        if (!reasons[i].what)
            reasons[i].what = what;
        if (!strcmp(reasons[i].what, what)) {
            reasons[i].count++;
            return;
        }
    }
}

/* xorshift64*: repeatable moments from --seed. */
static uint64_t random_state;
static int64_t random_below(int64_t n)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return n <= 0 ? 0 : (int64_t)((random_state * 0x2545F4914F6CDD1DULL) >> 11) % n;
}

/* ---- reading an answer --------------------------------------------------- */

static void begin_answer(struct conn *c)
{
    c->has_head = c->chunked = false;
    c->status = 0;
    c->left = c->body_bytes = c->tokens = c->comments = 0;
    c->chunk = SIZE;
    c->finishes = c->dones = c->errors = c->strays = c->usages = 0;
    c->items = c->deltas = c->acked = c->came_at = 0;
    c->asked = false;
    c->broken = NULL;
    c->first_at = c->last_at = 0;
    c->text.off = c->text.len = 0;
}

static void content_event(struct conn *c, const char *digits, int64_t now)
{
    int64_t index = 0;
    for (int i = 0; i < CONTENT_DIGITS; i++)
        index = index * 10 + (digits[i] - '0');
    if (index != c->tokens)
        c->broken = "token out of order";
    c->tokens++;
    total_tokens++;
    if (c->last_at == 0) {
        c->first_at = now;
        first_tokens++;
    } else if (c->gaps)
        c->gaps[c->gap_count++] = now - c->last_at;
    c->last_at = now;
}

/* The event that comes next has to be this. Its length if ``p`` begins with it, else 0. */
static size_t expected(struct conn *c, const char *p, size_t n)
{
    int64_t item = c->items++;
    const char *text = item == 0 ? role_event : item <= opt.tokens ? content_event_text : finish_event;
    size_t len = (size_t)(item == 0 ? role_len : item <= opt.tokens ? content_len : finish_len);
    if (item > opt.tokens + 1)
        return 0;
    if (item && item <= opt.tokens)
        put_digits(content_event_text + content_digits + 8, 8, item - 1, '0');
    return n >= len && !memcmp(p, text, len) ? len : 0;
}

/* The engine fills up with its own name of the model; this much longer is what comes here. */
static int64_t names_differ_by(void)
{
    return *opt.upstream ? (int64_t)strlen(opt.model) - (int64_t)strlen(opt.upstream) : 0;
}

static void learn_events(void)
{
    int64_t size = (opt.bytes < 0 ? 250 : opt.bytes) + names_differ_by();
    role_len = event_role(role_event, opt.model);
    content_len = event_content(content_event_text, opt.model, size, &content_digits);
    finish_len = event_finish(finish_event, opt.model);
    role_event[role_len++] = content_event_text[content_len++] = finish_event[finish_len++] = '}';
}

static void one_event(struct conn *c, const char *p, size_t n, int64_t now)
{
    static const char CONTENT[] = "\"content\":\" t", FINISH[] = "\"finish_reason\":\"";
    if (n && p[0] == ':') {
        c->comments++;
        return;
    }
    if (c->dones) {
        c->strays++;
        return;
    }
    if (n == 12 && !memcmp(p, "data: [DONE]", 12)) {
        c->dones++;
        return;
    }
    if (opt.exact && !c->ws && (n < 6 || memcmp(p, "data: ", 6) || expected(c, p + 6, n - 6) != n - 6))
        c->broken = "other bytes";
    const char *content = memmem(p, n, CONTENT, sizeof CONTENT - 1);
    if (content && content + sizeof CONTENT - 1 + CONTENT_DIGITS <= p + n)
        content_event(c, content + sizeof CONTENT - 1, now);
    else if (memmem(p, n, FINISH, sizeof FINISH - 1))
        c->finishes++;
    else if (memmem(p, n, "\"error\"", 7))
        c->errors++;
    else if (memmem(p, n, "\"usage\":{", 9))
        c->usages++;
}

static void scan_events(struct conn *c, int64_t now)
{
    char *p = c->text.p + c->text.off, *end = c->text.p + c->text.len, *blank;
    while (p < end && (blank = memmem(p, (size_t)(end - p), "\n\n", 2))) {
        one_event(c, p, (size_t)(blank - p), now);
        p = blank + 2;
    }
    c->text.off = (size_t)(p - c->text.p);
}

static void body_bytes(struct conn *c, const char *p, size_t n)
{
    c->body_bytes += (int64_t)n;
    if (c->chunked)
        buf_add(&c->text, p, n);
}

static enum step judge(struct conn *c, bool stream)
{
    if (c->status != 200) {
        static char named[600][16];
        int at = c->status >= 0 && c->status < 600 ? c->status : 0;
        snprintf(named[at], sizeof named[at], "status %d", at);
        c->broken = named[at];
    } else if (stream && !c->broken) {
        if (c->errors)
            c->broken = "error event";
        else if (c->tokens != opt.tokens)
            c->broken = "wrong number of tokens";
        else if (c->finishes != 1)
            c->broken = "not one finish";
        else if (c->dones != 1)
            c->broken = "not one [DONE]";
        else if (c->strays || c->text.off != c->text.len)
            c->broken = "bytes after [DONE]";
        else if (opt.usage ? c->usages != 1 : c->usages)
            c->broken = "usage not as asked";
    } else if (!c->broken && c->body_bytes < (opt.bytes < 0 ? 1024 : opt.bytes) + names_differ_by())
        c->broken = "short body";
    return c->broken ? BROKEN : ENDED;
}

static enum step bad(struct conn *c, const char *why)
{
    c->broken = why;
    return BROKEN;
}

/* One chunk size line, or the rest of the framing; MORE: not all of it is here. */
static enum step framing_line(struct conn *c, char **line, size_t *n)
{
    char *p = c->in.p + c->in.off, *end = memmem(p, c->in.len - c->in.off, "\r\n", 2);
    if (!end)
        return MORE;
    *line = p;
    *n = (size_t)(end - p);
    c->in.off += *n + 2;
    return ENDED;
}

static enum step chunks(struct conn *c, int64_t now)
{
    char *line;
    size_t n;
    enum step step = MORE;
    for (;;) {
        size_t here = c->in.len - c->in.off;
        if (c->chunk == DATA) {
            size_t take = here < (size_t)c->left ? here : (size_t)c->left;
            body_bytes(c, c->in.p + c->in.off, take);
            c->in.off += take;
            c->left -= (int64_t)take;
            if (c->left)
                break;
            c->chunk = DATA_END;
        } else if (framing_line(c, &line, &n) == MORE)
            break;
        else if (c->chunk == SIZE) {
            char *rest;
            c->left = strtoll(line, &rest, 16);
            if (rest == line || c->left < 0)
                return bad(c, "bad framing");
            c->chunk = c->left ? DATA : TRAILER;
        } else if (c->chunk == DATA_END) {
            if (n)
                return bad(c, "bad framing");
            c->chunk = SIZE;
        } else if (n == 0) {
            step = ENDED;
            break;
        }
    }
    scan_events(c, now);
    return step;
}

/* ---- WebSockets ----------------------------------------------------------- */

static void add_frame(struct buf *to, int opcode, const char *p, size_t n)
{
    char head[8] = {(char)(0x80 | opcode), (char)(0x80 | (n < 126 ? n : 126)), (char)(n >> 8), (char)n};
    buf_add(to, head, n < 126 ? 2 : 4);
    buf_add(to, "\0\0\0\0", 4); /* the mask */
    buf_add(to, p, n);
}

/* Send what waits, as far as it goes. */
static void say(struct conn *c)
{
    while (c->out.off < c->out.len) {
        ssize_t n = send(c->fd, c->out.p + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL);
        if (n < 0)
            return; /* reading will tell if nobody is there */
        c->out.off += (size_t)n;
    }
}

static void acknowledge(struct conn *c)
{
    char text[128];
    c->acked = c->deltas;
    int n = snprintf(text, sizeof text, "{\"type\":\"ack\",\"stream_id\":\"s\",\"seq\":%lld}", (long long)c->acked);
    add_frame(&c->out, 1, text, (size_t)n);
    say(c);
}

static void delta(struct conn *c, const char *p, size_t n, int64_t now)
{
    static const char HEAD[] = "{\"type\":\"delta\",\"stream_id\":\"s\",\"seq\":", CHUNK[] = ",\"chunk\":", TOKENS[] = ",\"tokens\":";
    char *chunk;
    c->came_at = now;
    if (n < sizeof HEAD || memcmp(p, HEAD, sizeof HEAD - 1) || strtoll(p + sizeof HEAD - 1, &chunk, 10) != ++c->deltas ||
        memcmp(chunk, CHUNK, sizeof CHUNK - 1)) {
        c->broken = "delta out of order";
        return;
    }
    chunk += sizeof CHUNK - 1;
    size_t left = (size_t)(p + n - chunk), len = opt.exact ? expected(c, chunk, left) : 0;
    if (opt.exact && (!len || left < len + sizeof TOKENS || memcmp(chunk + len, TOKENS, sizeof TOKENS - 1)))
        c->broken = "other bytes";
    one_event(c, chunk, left, now);
    if (c->credited && strcmp(opt.mode, "stall") && c->deltas - c->acked >= (opt.credit + 1) / 2)
        acknowledge(c);
}

static enum step message(struct conn *c, const char *p, size_t n, int64_t now)
{
    static const char TYPE[] = "{\"type\":\"";
    if (n < sizeof TYPE || memcmp(p, TYPE, sizeof TYPE - 1))
        return bad(c, "no message");
    const char *type = p + sizeof TYPE - 1;
    if (!strncmp(type, "delta\"", 6))
        delta(c, p, n, now);
    else if (!strncmp(type, "done\"", 5)) {
        c->dones++;
        return ENDED;
    } else if (strncmp(type, "queued\"", 7) && strncmp(type, "accepted\"", 9))
        return bad(c, memmem(p, n, "\"client_stalled\"", 16) ? "client_stalled" : "error message");
    return MORE;
}

static enum step messages(struct conn *c, int64_t now)
{
    for (;;) {
        unsigned char *p = (unsigned char *)c->in.p + c->in.off;
        size_t here = c->in.len - c->in.off, n, head = 2;
        if (here < 2)
            return MORE;
        n = p[1];
        if (n == 126)
            head = 4;
        else if (n > 126 || !(p[0] & 0x80))
            return bad(c, "bad frame");
        if (here < head)
            return MORE;
        if (n == 126)
            n = (size_t)(p[2] << 8 | p[3]);
        if (here < head + n)
            return MORE;
        c->in.off += head + n;
        enum step step = MORE;
        if ((p[0] & 15) == 1)
            step = message(c, (char *)p + head, n, now);
        else if ((p[0] & 15) == 9) {
            add_frame(&c->out, 10, (char *)p + head, n);
            say(c);
        } else if ((p[0] & 15) == 8)
            return bad(c, "closed");
        if (step != MORE)
            return step;
    }
}

/* Interim answers (1xx) are skipped: a gateway may ask with them who is still there. */
static enum step heads(struct conn *c)
{
    while (!c->has_head) {
        char *p = c->in.p + c->in.off, *end = memmem(p, c->in.len - c->in.off, "\r\n\r\n", 4);
        if (!end)
            return MORE;
        if (memcmp(p, "HTTP/1.1 ", 9))
            return bad(c, "bad head");
        c->status = atoi(p + 9);
        end[2] = 0;
        const char *length = strcasestr(p, "\r\ncontent-length:");
        c->chunked = strcasestr(p, "\r\ntransfer-encoding: chunked") != NULL;
        c->left = length ? strtoll(length + 17, NULL, 10) : 0;
        c->in.off += (size_t)(end + 4 - p);
        if (c->status == 101 && c->ws) {
            c->status = 200;
            c->has_head = true;
            buf_add(&c->out, c->ask.p, c->ask.len);
            say(c);
            c->asked = true;
        } else if (c->status >= 200) {
            if (!length && !c->chunked)
                return bad(c, "no framing");
            c->has_head = true;
        }
    }
    return ENDED;
}

static enum step read_answer(struct conn *c, bool stream)
{
    size_t most = opt.rate && c->asked ? (size_t)(opt.rate / READS_A_SECOND) : READ;
    buf_room(&c->in, most);
    ssize_t n = recv(c->fd, c->in.p + c->in.len, most, 0);
    int64_t now = now_ns();
    if (n < 0)
        return errno == EAGAIN ? MORE : bad(c, "reset");
    if (n == 0)
        return bad(c, "cut");
    c->in.len += (size_t)n;
    enum step step = heads(c);
    if (step != ENDED)
        return step;
    if (c->asked && c->ws)
        step = messages(c, now);
    else if (c->chunked)
        step = chunks(c, now);
    else {
        size_t here = c->in.len - c->in.off, take = here < (size_t)c->left ? here : (size_t)c->left;
        body_bytes(c, c->in.p + c->in.off, take);
        c->in.off += take;
        c->left -= (int64_t)take;
        step = c->left ? MORE : ENDED;
    }
    if (step != ENDED)
        return step;
    leftover_bytes += (int64_t)(c->in.len - c->in.off);
    return judge(c, stream);
}

/* ---- asking ---------------------------------------------------------------- */

/* What the engine shall do, in a field of its own, or inside a string. */
static void wish(struct buf *body, const char *name, int64_t value)
{
    buf_fmt(body, opt.in_user ? "%s=%lld " : ",\"%s\":%lld", name, (long long)value);
}

static void show_key(struct conn *c)
{
    if (key_count) {
        const struct key *key = &keys[c->index % key_count];
        buf_fmt(&c->out, "authorization: Bearer %.*s\r\n", key->len, key->at);
    }
}

static void make_request(struct conn *c, bool stream)
{
    struct buf body = {0};
    int64_t phase_us = opt.pace_us && opt.spread ? opt.pace_us * c->index / opt.streams : -1;
    /* --vary 1: delays between half and one and a half of --delay-us, so that answers do not march in step. */
    int64_t delay_us = opt.vary ? opt.delay_us / 2 + random_below(opt.delay_us) : opt.delay_us;
    buf_fmt(&body, "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me about the sea.\"}],\"stream\":%s",
            opt.model, stream ? "true" : "false");
    if (opt.in_user)
        buf_fmt(&body, ",\"user\":\"");
    wish(&body, "bench_id", c->id);
    wish(&body, "bench_tokens", opt.tokens);
    wish(&body, "bench_pace_us", opt.pace_us);
    wish(&body, "bench_phase_us", phase_us);
    wish(&body, "bench_delay_us", delay_us);
    wish(&body, "bench_head", opt.head);
    if (opt.bytes >= 0)
        wish(&body, "bench_bytes", opt.bytes);
    if (opt.batch)
        wish(&body, "bench_batch", opt.batch);
    if (opt.in_user)
        buf_fmt(&body, "\"");
    if (opt.usage)
        buf_fmt(&body, ",\"stream_options\":{\"include_usage\":true}");
    buf_fmt(&body, "}");
    c->out.off = c->out.len = 0;
    begin_answer(c);
    if (c->ws) {
        struct buf ask = {0};
        buf_fmt(&ask, "{\"type\":\"generate\",\"stream_id\":\"s\",\"operation\":\"chat.completions\",\"body\":%.*s",
                (int)body.len, body.p);
        if (c->credited)
            buf_fmt(&ask, ",\"credit\":%lld", (long long)opt.credit);
        buf_fmt(&ask, "}");
        c->ask.off = c->ask.len = 0;
        add_frame(&c->ask, 1, ask.p, ask.len);
        buf_free(&ask);
        buf_free(&body);
        buf_fmt(&c->out,
                "GET /v1/tokens HTTP/1.1\r\nhost: %s:%lld\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
                "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
                opt.host, (long long)opt.port);
        show_key(c);
        buf_fmt(&c->out, "\r\n");
        return;
    }
    buf_fmt(&c->out,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: %s:%lld\r\ncontent-type: application/json\r\n"
            "accept: %s\r\nuser-agent: bench\r\ncontent-length: %zu\r\n",
            opt.host, (long long)opt.port, stream ? "text/event-stream" : "application/json", body.len);
    show_key(c);
    buf_fmt(&c->out, "%s%s\r\n", opt.header, *opt.header ? "\r\n" : "");
    buf_add(&c->out, body.p, body.len);
    buf_free(&body);
}

static void watch(struct conn *c, uint32_t events, int how)
{
    struct epoll_event e = {.events = events, .data.ptr = c};
    epoll_ctl(poll_fd, how, c->fd, &e);
}

static void open_conn(struct conn *c, bool reads)
{
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        die("socket");
    int one = 1, size = (int)opt.rcvbuf;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (size)
        setsockopt(c->fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    inet_pton(AF_INET, opt.host, &a.sin_addr);
    c->live = true;
    c->connected = false;
    c->in.off = c->in.len = 0;
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS)
        die("connect");
    watch(c, EPOLLOUT | (reads ? EPOLLIN : 0u), EPOLL_CTL_ADD);
}

static void close_conn(struct conn *c)
{
    if (c->live)
        close(c->fd);
    c->live = false;
}

/* False: the connection failed. */
static bool send_request(struct conn *c, uint32_t afterwards)
{
    while (c->out.off < c->out.len) {
        ssize_t n = send(c->fd, c->out.p + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL);
        if (n < 0)
            return errno == EAGAIN;
        c->out.off += (size_t)n;
    }
    c->sent_at = now_ns();
    c->asked = !c->ws;
    if (!c->connected)
        watch(c, afterwards, EPOLL_CTL_MOD);
    c->connected = true;
    return true;
}

/* ---- windows ----------------------------------------------------------------- */

static void open_window(void)
{
    window_from = now_ns();
    own_before = own_cpu_ns();
    tokens_before = total_tokens;
    for (int i = 0; i < pid_count; i++)
        cpu_before[i] = process_cpu_ns(pids[i]);
}

static void close_window(void)
{
    for (int i = 0; i < pid_count; i++)
        cpu_after[i] = process_cpu_ns(pids[i]);
    tokens_after = total_tokens;
    own_after = own_cpu_ns();
    window_to = now_ns();
}

static int wait_ms(int64_t until)
{
    int64_t left = until - now_ns();
    return left <= 0 ? 0 : (int)((left + MILLISECOND - 1) / MILLISECOND);
}

static void end_answer(struct conn *c)
{
    finished++;
    if (c->broken)
        reason(c->broken);
    else
        good++;
}

/* ---- modes -------------------------------------------------------------------- */

/* Read the streams whose time has come; when the next one has its. */
static int64_t read_slowly(int64_t opened, int64_t now)
{
    int64_t wake = now + SECOND / 10;
    for (int64_t i = 0; i < opened; i++) {
        struct conn *c = &conns[i];
        if (!c->live || !c->asked)
            continue;
        if (c->read_due <= now) {
            c->read_due = (c->read_due ? c->read_due : now) + SECOND / READS_A_SECOND;
            if (read_answer(c, true) != MORE) {
                end_answer(c);
                close_conn(c);
                continue;
            }
        }
        if (c->read_due < wake)
            wake = c->read_due;
    }
    return wake;
}

static void run_streams(void)
{
    int64_t opened = 0, next_open = now_ns(), window_due = 0;
    bool windowed = opt.window_ms > 0;
    if (!windowed)
        open_window();
    for (int64_t i = 0; i < opt.streams; i++) {
        conns[i].id = opt.id_base + i;
        if (opt.measured < 0 || i < opt.measured)
            conns[i].gaps = malloc(sizeof(int64_t) * (size_t)opt.tokens);
    }
    while (finished < opt.streams) {
        struct epoll_event events[512];
        int64_t now = now_ns();
        for (; opened < opt.streams && next_open <= now; opened++, next_open += opt.ramp_us * 1000) {
            make_request(&conns[opened], true);
            open_conn(&conns[opened], true);
        }
        int64_t slow_wake = opt.rate ? read_slowly(opened, now) : 0;
        if (finished == opt.streams)
            break;
        if (windowed && !window_from && first_tokens == opt.streams) {
            if (!window_due)
                window_due = now + opt.warm_ms * MILLISECOND;
            if (now >= window_due)
                open_window();
        }
        if (windowed && window_from && !window_to && now >= window_from + opt.window_ms * MILLISECOND)
            close_window();
        int64_t wake = now + SECOND / 10;
        if (opened < opt.streams)
            wake = next_open;
        else if (window_from && !window_to && windowed)
            wake = window_from + opt.window_ms * MILLISECOND;
        else if (window_due && !window_from)
            wake = window_due;
        if (slow_wake && slow_wake < wake)
            wake = slow_wake;
        int n = epoll_wait(poll_fd, events, 512, wait_ms(wake));
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            enum step step = MORE;
            bool waits = opt.rate && c->asked;
            if ((events[i].events & EPOLLOUT) && !c->connected && !send_request(c, opt.rate && !c->ws ? 0 : EPOLLIN))
                step = bad(c, "connect");
            else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                step = read_answer(c, true);
            if (step != MORE) {
                end_answer(c);
                close_conn(c);
            } else if (opt.rate && c->ws && c->asked && !waits)
                watch(c, 0, EPOLL_CTL_MOD); /* from now on it is read by the clock */
        }
    }
    if (!windowed)
        close_window();
}

static void run_buffered(void)
{
    int64_t last = opt.requests + opt.warm, total = last + opt.tail;
    latencies = malloc(sizeof(int64_t) * (size_t)total);
    if (opt.warm == 0)
        open_window();
    int64_t opened = 0, next_open = now_ns();
    while (finished < last) {
        struct epoll_event events[512];
        int64_t now = now_ns();
        for (; opened < opt.streams && issued < total && next_open <= now; next_open += opt.ramp_us * 1000) {
            struct conn *c = &conns[opened++];
            c->id = opt.id_base + issued++;
            make_request(c, false);
            open_conn(c, true);
        }
        int n = epoll_wait(poll_fd, events, 512, opened < opt.streams && issued < total ? wait_ms(next_open) : 100);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            enum step step = MORE;
            if ((events[i].events & EPOLLOUT) && !c->connected && !send_request(c, EPOLLIN))
                step = bad(c, "connect");
            else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                step = read_answer(c, false);
            if (step == MORE)
                continue;
            end_answer(c);
            if (window_from && !window_to)
                latencies[latency_count++] = now_ns() - c->sent_at;
            if (finished == opt.warm)
                open_window();
            if (finished == last)
                close_window();
            bool reusable = step == ENDED;
            if (!reusable)
                close_conn(c);
            if (issued >= total)
                continue;
            c->id = opt.id_base + issued++;
            make_request(c, false);
            if (!reusable)
                open_conn(c, true);
            else if (!send_request(c, EPOLLIN))
                die("send");
        }
    }
}

/* Leave now. For a FIN nothing may be unread, or the kernel would reset. */
static void leave(struct conn *c)
{
    static char sink[64 * 1024];
    struct linger reset = {1, 0};
    if (c->by_reset)
        setsockopt(c->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    else
        while (recv(c->fd, sink, sizeof sink, 0) > 0)
            ;
    int64_t at = now_ns();
    close(c->fd);
    c->live = false;
    tries[try_count++] = (struct try_record){c->id, at, c->tokens, c->by_reset, "left"};
}

static void spoiled(struct conn *c)
{
    tries[try_count++] = (struct try_record){c->id, now_ns(), c->tokens, c->by_reset,
                                             c->broken ? c->broken : "ended before leaving"};
    close_conn(c);
}

static void begin_try(struct conn *c, bool stream)
{
    c->id = opt.id_base + issued++;
    c->by_reset = !strcmp(opt.how, "rst") || (!strcmp(opt.how, "mix") && random_below(2));
    c->leave_at = 0;
    c->leave_tokens = strcmp(opt.phase, "streaming") ? 0 : 1 + random_below(opt.max_tokens);
    make_request(c, stream);
    open_conn(c, true);
}

static void run_leaving(void)
{
    bool stream = strcmp(opt.phase, "buffered") != 0;
    tries = malloc(sizeof *tries * (size_t)opt.tries);
    open_window();
    while (try_count < opt.tries) {
        struct epoll_event events[512];
        int64_t now = now_ns(), wake = now + SECOND / 10;
        for (int64_t i = 0; i < opt.streams; i++) {
            struct conn *c = &conns[i];
            if (c->live && c->leave_at && c->leave_at <= now) {
                leave(c);
                c->open_at = now + opt.pause_us * 1000;
            }
            if (!c->live && issued < opt.tries && c->open_at <= now)
                begin_try(c, stream);
            int64_t due = c->live ? c->leave_at : issued < opt.tries ? c->open_at : 0;
            if (due && due < wake)
                wake = due;
        }
        if (try_count == opt.tries)
            break;
        int n = epoll_wait(poll_fd, events, 512, wait_ms(wake));
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            enum step step = MORE;
            if (!c->connected && (events[i].events & EPOLLOUT)) {
                if (!send_request(c, EPOLLIN))
                    step = bad(c, "connect");
                if (c->connected && !c->leave_tokens)
                    c->leave_at = c->sent_at + (opt.min_us + random_below(opt.max_us - opt.min_us + 1)) * 1000;
            } else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                step = read_answer(c, stream);
            if (step != MORE) {
                spoiled(c);
                c->open_at = now_ns() + opt.pause_us * 1000;
            } else if (c->leave_tokens && !c->leave_at && c->tokens >= c->leave_tokens)
                c->leave_at = now_ns() + (opt.min_us + random_below(opt.max_us - opt.min_us + 1)) * 1000;
        }
    }
    close_window();
}

static void run_holding(void)
{
    int64_t opened = 0, asked = 0, next_open = now_ns(), until = 0;
    struct epoll_event in = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, 0, &in);
    open_window();
    for (bool held = true; held;) {
        struct epoll_event events[512];
        int64_t now = now_ns();
        for (; opened < opt.streams && next_open <= now; opened++, next_open += opt.ramp_us * 1000) {
            conns[opened].id = opt.id_base + opened;
            make_request(&conns[opened], true);
            open_conn(&conns[opened], false);
        }
        if (!until && asked + finished == opt.streams) {
            printf("ready\n");
            fflush(stdout);
            until = now + opt.hold_ms * MILLISECOND;
        }
        if (until && now >= until)
            break;
        int n = epoll_wait(poll_fd, events, 512, opened < opt.streams ? wait_ms(next_open) : 50);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c) {
                char ignored[64];
                held = read(0, ignored, sizeof ignored) > 0;
                continue;
            }
            if (!c->live)
                continue;
            if (events[i].events & (EPOLLHUP | EPOLLERR)) {
                c->broken = "cut while held";
                end_answer(c);
                close_conn(c);
            } else if (!c->connected && send_request(c, 0) && c->connected)
                asked++;
        }
    }
    for (int64_t i = 0; i < opened; i++) {
        if (!conns[i].live)
            continue;
        conns[i].broken = NULL;
        end_answer(&conns[i]);
        close_conn(&conns[i]);
    }
    close_window();
}

/* How it ended, and when the last byte before that had come. */
static void note_end(struct conn *c, const char *result)
{
    int64_t now = now_ns(), last = c->came_at;
    struct tcp_info info;
    socklen_t n = sizeof info;
    if (!c->credited && getsockopt(c->fd, IPPROTO_TCP, TCP_INFO, &info, &n) == 0)
        last = now - (int64_t)info.tcpi_last_data_recv * MILLISECOND;
    ends[end_count++] = (struct end_record){c->id, last, now, !c->ws ? "sse" : c->credited ? "credit" : "ws", result};
    close_conn(c);
}

static void run_stalling(void)
{
    int64_t opened = 0, next_open = now_ns();
    ends = malloc(sizeof *ends * (size_t)opt.streams);
    open_window();
    while (end_count < opt.streams) {
        struct epoll_event events[512];
        int64_t now = now_ns();
        for (; opened < opt.streams && next_open <= now; opened++, next_open += opt.ramp_us * 1000) {
            conns[opened].id = opt.id_base + opened;
            make_request(&conns[opened], true);
            open_conn(&conns[opened], conns[opened].ws);
        }
        int n = epoll_wait(poll_fd, events, 512, opened < opt.streams ? wait_ms(next_open) : 100);
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c->live)
                continue;
            if (!c->connected && (events[i].events & EPOLLOUT)) {
                if (!send_request(c, c->ws ? EPOLLIN : 0))
                    note_end(c, "not connected");
            } else if ((events[i].events & EPOLLIN) && read_answer(c, true) != MORE)
                note_end(c, c->broken ? c->broken : "whole");
            else if (events[i].events & (EPOLLHUP | EPOLLERR))
                note_end(c, "cut");
            else if (c->ws && c->asked && !c->credited)
                watch(c, 0, EPOLL_CTL_MOD);
        }
    }
    close_window();
}

/* ---- report --------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static void report_spread(const char *name, int64_t *v, int64_t n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    printf(",\"%s\":{\"count\":%lld", name, (long long)n);
    if (n)
        printf(",\"p50\":%lld,\"p90\":%lld,\"p99\":%lld,\"max\":%lld", (long long)v[n / 2], (long long)v[n * 90 / 100],
               (long long)v[n * 99 / 100], (long long)v[n - 1]);
    printf("}");
}

static void report(void)
{
    printf("{\"mode\":\"%s\",\"finished\":%lld,\"good\":%lld,\"window_ns\":%lld,\"own_cpu_ns\":%lld,"
           "\"tokens\":%lld,\"leftover_bytes\":%lld,\"total_wall_ns\":%lld",
           opt.mode, (long long)finished, (long long)good, (long long)(window_to - window_from),
           (long long)(own_after - own_before),
           (long long)(tokens_after - tokens_before), (long long)leftover_bytes, (long long)(now_ns() - started_at));
    printf(",\"cpu_ns\":[");
    for (int i = 0; i < pid_count; i++)
        printf("%s%lld", i ? "," : "", cpu_before[i] < 0 || cpu_after[i] < 0 ? -1LL : (long long)(cpu_after[i] - cpu_before[i]));
    printf("],\"broken\":{");
    for (int i = 0; i < MAX_REASONS && reasons[i].what; i++)
        printf("%s\"%s\":%lld", i ? "," : "", reasons[i].what, (long long)reasons[i].count);
    printf("}");
    if (!strcmp(opt.mode, "stream")) {
        int64_t gap_count = 0, first_count = 0, comments = 0;
        int64_t *gaps, *firsts = malloc(sizeof(int64_t) * (size_t)opt.streams);
        for (int64_t i = 0; i < opt.streams; i++)
            gap_count += conns[i].gap_count;
        gaps = malloc(sizeof(int64_t) * (size_t)(gap_count + 1));
        gap_count = 0;
        for (int64_t i = 0; i < opt.streams; i++) {
            if (conns[i].gap_count)
                memcpy(gaps + gap_count, conns[i].gaps, sizeof(int64_t) * (size_t)conns[i].gap_count);
            gap_count += conns[i].gap_count;
            comments += conns[i].comments;
            if (conns[i].first_at)
                firsts[first_count++] = conns[i].first_at - conns[i].sent_at;
        }
        report_spread("gap_ns", gaps, gap_count);
        report_spread("first_token_ns", firsts, first_count);
        printf(",\"comments\":%lld", (long long)comments);
    }
    if (!strcmp(opt.mode, "buffered"))
        report_spread("latency_ns", latencies, latency_count);
    if (!strcmp(opt.mode, "leave")) {
        printf(",\"tries\":[");
        for (int64_t i = 0; i < try_count; i++)
            printf("%s[%lld,%lld,%lld,\"%s\",\"%s\"]", i ? "," : "", (long long)tries[i].id, (long long)tries[i].left_ns,
                   (long long)tries[i].tokens, tries[i].by_reset ? "rst" : "fin", tries[i].result);
        printf("]");
    }
    if (!strcmp(opt.mode, "stall")) {
        printf(",\"ends\":[");
        for (int64_t i = 0; i < end_count; i++)
            printf("%s[%lld,%lld,%lld,\"%s\",\"%s\"]", i ? "," : "", (long long)ends[i].id, (long long)ends[i].last_ns,
                   (long long)ends[i].ended_ns, ends[i].kind, ends[i].result);
        printf("]");
    }
    printf("}\n");
}

static const struct { const char *name; const char **text; int64_t *number; } OPTIONS[] = {
    {"mode", &opt.mode, NULL}, {"host", &opt.host, NULL}, {"model", &opt.model, NULL}, {"phase", &opt.phase, NULL},
    {"how", &opt.how, NULL}, {"pids", &opt.pids, NULL}, {"keys", &opt.keys, NULL}, {"header", &opt.header, NULL},
    {"upstream", &opt.upstream, NULL}, {"tail", NULL, &opt.tail}, {"in-user", NULL, &opt.in_user},
    {"port", NULL, &opt.port}, {"streams", NULL, &opt.streams}, {"tokens", NULL, &opt.tokens}, {"pace-us", NULL, &opt.pace_us}, {"spread", NULL, &opt.spread},
    {"delay-us", NULL, &opt.delay_us}, {"head", NULL, &opt.head}, {"bytes", NULL, &opt.bytes},
    {"requests", NULL, &opt.requests}, {"warm", NULL, &opt.warm}, {"usage", NULL, &opt.usage},
    {"ramp-us", NULL, &opt.ramp_us}, {"warm-ms", NULL, &opt.warm_ms}, {"window-ms", NULL, &opt.window_ms},
    {"measured", NULL, &opt.measured}, {"tries", NULL, &opt.tries}, {"min-us", NULL, &opt.min_us},
    {"max-us", NULL, &opt.max_us}, {"max-tokens", NULL, &opt.max_tokens}, {"id-base", NULL, &opt.id_base},
    {"pause-us", NULL, &opt.pause_us}, {"rcvbuf", NULL, &opt.rcvbuf}, {"hold-ms", NULL, &opt.hold_ms},
    {"rate", NULL, &opt.rate}, {"exact", NULL, &opt.exact}, {"ws", NULL, &opt.ws}, {"credit", NULL, &opt.credit},
    {"batch", NULL, &opt.batch}, {"vary", NULL, &opt.vary}, {"limit-s", NULL, &opt.limit_s}, {"seed", NULL, &opt.seed},
};
enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0] };

static void read_options(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        int at = 0;
        while (at < OPTION_COUNT && (strncmp(argv[i], "--", 2) || strcmp(argv[i] + 2, OPTIONS[at].name)))
            at++;
        if (at == OPTION_COUNT) {
            fprintf(stderr, "client: no option %s\n", argv[i]);
            exit(2);
        }
        if (OPTIONS[at].text)
            *OPTIONS[at].text = argv[i + 1];
        else
            *OPTIONS[at].number = strtoll(argv[i + 1], NULL, 10);
    }
    for (const char *p = opt.pids; *p && pid_count < MAX_PIDS;) {
        char *end;
        pids[pid_count++] = (int)strtol(p, &end, 10);
        p = *end ? end + 1 : end;
    }
    for (const char *p = opt.keys; *p && key_count < MAX_KEYS;) {
        size_t len = strcspn(p, ",");
        keys[key_count++] = (struct key){p, (int)len};
        p += len + (p[len] == ',');
    }
    random_state = (uint64_t)opt.seed * 0x9E3779B97F4A7C15ULL + 1;
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    bound_life((unsigned)opt.limit_s);
    started_at = now_ns();
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    conns = calloc((size_t)opt.streams, sizeof *conns);
    if (poll_fd < 0 || !conns)
        die("start");
    learn_events();
    for (int64_t i = 0; i < opt.streams; i++) {
        conns[i].index = (int)i;
        conns[i].ws = opt.ws == 1 || (opt.ws == 2 && i % 2);
        conns[i].credited = conns[i].ws && opt.credit && i / opt.ws % 2;
    }
    if (!strcmp(opt.mode, "stream"))
        run_streams();
    else if (!strcmp(opt.mode, "buffered"))
        run_buffered();
    else if (!strcmp(opt.mode, "leave"))
        run_leaving();
    else if (!strcmp(opt.mode, "hold"))
        run_holding();
    else if (!strcmp(opt.mode, "stall"))
        run_stalling();
    else {
        fprintf(stderr, "client: no mode %s\n", opt.mode);
        return 2;
    }
    report();
    return 0;
}
