/* Clients that come whether they are served or not, and come again when they are told to.
 *
 * One thread, one epoll set, one JSON line on stdout. Each of R clients asks for one buffered
 * answer; the moments at which they come first are spread evenly over R / rate seconds. A
 * refusal is an answer of status 429 or 503 that has both `Retry-After` and `retry-after-ms`;
 * another answer than that or a whole 200 is broken.
 *
 *   --rate-milli-s  arrivals in 1,000 seconds
 *   --obey          0: the refused do not come again; 1: after the whole seconds of
 *                   `Retry-After`; 2: after the milliseconds; 3: every second client so
 *   --patience-s    nobody comes again later than this after the first arrival
 *   --connections   kept ones at most; a client that finds none idle is counted and waits
 *
 * `CPU` of the processes in --pids is read at the first arrival and when all is over;
 * `returns_ms` are the moments at which clients came again, since the first arrival;
 * `attempts` counts clients by how often they came, `by_second` served and refused answers
 * by the second in which they ended.
 */
#include "common.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>

enum { MAX_PIDS = 64, READ = 64 * 1024, MAX_ATTEMPTS = 16, MAX_SECONDS = 600, MAX_REASONS = 16 };

static struct {
    const char *host, *model, *pids;
    int64_t port, requests, rate_milli_s, obey, patience_s, connections, delay_us, vary, limit_s, seed;
} opt = {
    .host = "127.0.0.1", .model = "bench-model", .pids = "", .requests = 1, .rate_milli_s = 1000, .patience_s = 120,
    .connections = 1024, .limit_s = 180, .seed = 1,
};

struct client {
    int64_t due; /* when it comes */
    int attempts;
    bool by_ms;
};

struct conn {
    int fd;
    bool open, connected, has_head;
    struct client *client;
    struct buf out, in;
    int status;
    int64_t left, body_bytes, retry_s, retry_ms, asked_at;
};

static int poll_fd;
static struct client *clients;
static struct client **heap; /* of those that will come again, by time */
static int64_t heap_len;
static struct conn *conns;
static struct conn **idle; /* a ring, taken from the front: every connection is opened early and used in turn */
static int64_t idle_count, idle_first;
static int pids[MAX_PIDS], pid_count;
static int64_t cpu_before[MAX_PIDS];
static int64_t begun_at, finished, served, refused, broken, starved, gave_up, longest_ns, longest_refusal_ns;
static int64_t attempts[MAX_ATTEMPTS], served_by[MAX_SECONDS], refused_by[MAX_SECONDS];
static int64_t *returns, return_count, return_cap;
static struct { const char *what; int64_t count; } reasons[MAX_REASONS];

static void reason(const char *what)
{
    broken++;
    for (int i = 0; i < MAX_REASONS; i++) {
        if (!reasons[i].what)
            reasons[i].what = what;
        if (!strcmp(reasons[i].what, what)) {
            reasons[i].count++;
            return;
        }
    }
}

/* xorshift64*: repeatable delays from --seed. */
static uint64_t random_state;
static int64_t random_below(int64_t n)
{
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return n <= 0 ? 0 : (int64_t)((random_state * 0x2545F4914F6CDD1DULL) >> 11) % n;
}

/* ---- who comes when ---------------------------------------------------------- */

static void come_again(struct client *c)
{
    int64_t i = heap_len++;
    while (i > 0 && heap[(i - 1) / 2]->due > c->due) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = c;
}

static struct client *first_to_return(void)
{
    struct client *first = heap[0], *last = heap[--heap_len];
    int64_t i = 0;
    for (;;) {
        int64_t child = 2 * i + 1;
        if (child >= heap_len)
            break;
        if (child + 1 < heap_len && heap[child + 1]->due < heap[child]->due)
            child++;
        if (heap[child]->due >= last->due)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return first;
}

static int64_t arrival(int64_t number)
{
    return begun_at + (int64_t)((double)number * 1e12 / (double)opt.rate_milli_s);
}

/* ---- asking --------------------------------------------------------------------- */

static void make_request(struct conn *c)
{
    /* --vary 1: delays between half and one and a half of --delay-us, so that answers do not march in step. */
    int64_t delay_us = opt.vary ? opt.delay_us / 2 + random_below(opt.delay_us) : opt.delay_us;
    struct buf body = {0};
    buf_fmt(&body,
            "{\"model\":\"%s\",\"messages\":[{\"role\":\"user\",\"content\":\"Tell me about the sea.\"}],"
            "\"stream\":false,\"bench_delay_us\":%lld}",
            opt.model, (long long)delay_us);
    c->out.off = c->out.len = 0;
    buf_fmt(&c->out,
            "POST /v1/chat/completions HTTP/1.1\r\nhost: %s:%lld\r\ncontent-type: application/json\r\n"
            "accept: application/json\r\nuser-agent: bench\r\ncontent-length: %zu\r\n\r\n",
            opt.host, (long long)opt.port, body.len);
    buf_add(&c->out, body.p, body.len);
    buf_free(&body);
    c->has_head = false;
    c->body_bytes = 0;
    c->asked_at = now_ns();
}

static void open_conn(struct conn *c)
{
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (c->fd < 0)
        die("socket");
    int one = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)opt.port)};
    inet_pton(AF_INET, opt.host, &a.sin_addr);
    c->open = true;
    c->connected = false;
    c->in.off = c->in.len = 0;
    if (connect(c->fd, (struct sockaddr *)&a, sizeof a) && errno != EINPROGRESS)
        die("connect");
    struct epoll_event e = {.events = EPOLLIN | EPOLLOUT, .data.ptr = c};
    epoll_ctl(poll_fd, EPOLL_CTL_ADD, c->fd, &e);
}

static bool send_request(struct conn *c)
{
    while (c->out.off < c->out.len) {
        ssize_t n = send(c->fd, c->out.p + c->out.off, c->out.len - c->out.off, MSG_NOSIGNAL);
        if (n < 0)
            return errno == EAGAIN;
        c->out.off += (size_t)n;
    }
    if (!c->connected) {
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poll_fd, EPOLL_CTL_MOD, c->fd, &e);
        c->connected = true;
    }
    return true;
}

static void set_idle(struct conn *c, bool reusable)
{
    if (!reusable) {
        close(c->fd);
        c->open = false;
    }
    c->client = NULL;
    idle[(idle_first + idle_count++) % opt.connections] = c;
}

static void end_client(struct client *k)
{
    finished++;
    attempts[k->attempts < MAX_ATTEMPTS ? k->attempts : MAX_ATTEMPTS - 1]++;
}

static void ask(struct client *k)
{
    struct conn *c = idle[idle_first];
    idle_first = (idle_first + 1) % opt.connections;
    idle_count--;
    c->client = k;
    k->attempts++;
    make_request(c);
    if (!c->open)
        open_conn(c);
    else if (!send_request(c)) {
        reason("connection lost");
        end_client(k);
        set_idle(c, false);
    }
}

/* ---- reading an answer ------------------------------------------------------------- */

static int64_t number_of(const char *head, const char *name)
{
    const char *line = strcasestr(head, name);
    return line ? strtoll(line + strlen(name), NULL, 10) : -1;
}

static const char *read_head(struct conn *c)
{
    while (!c->has_head) {
        char *p = c->in.p + c->in.off, *end = memmem(p, c->in.len - c->in.off, "\r\n\r\n", 4);
        if (!end)
            return NULL;
        if (memcmp(p, "HTTP/1.1 ", 9))
            return "bad head";
        end[2] = 0;
        c->status = atoi(p + 9);
        c->left = number_of(p, "\r\ncontent-length:");
        c->retry_s = number_of(p, "\r\nretry-after:");
        c->retry_ms = number_of(p, "\r\nretry-after-ms:");
        c->in.off += (size_t)(end + 4 - p);
        if (c->status >= 200) {
            if (c->left < 0)
                return "no framing";
            c->has_head = true;
        }
    }
    return NULL;
}

static void judge(struct conn *c)
{
    struct client *k = c->client;
    int64_t now = now_ns(), second = (now - begun_at) / SECOND;
    second = second < MAX_SECONDS ? second : MAX_SECONDS - 1;
    if (c->status == 200 && c->body_bytes >= 1024) {
        served++;
        served_by[second]++;
        if (now - c->asked_at > longest_ns)
            longest_ns = now - c->asked_at;
        end_client(k);
        return;
    }
    bool refusal = c->status == 429 || c->status == 503;
    if (!refusal || c->retry_s < 1 || c->retry_ms < 1 || c->retry_s * 1000 < c->retry_ms ||
        c->retry_s * 1000 > c->retry_ms + 1001) {
        static char named[600][24];
        int at = c->status > 0 && c->status < 600 ? c->status : 0;
        snprintf(named[at], sizeof named[at], "%s %d", refusal ? "times of" : "status", at);
        reason(named[at]);
        end_client(k);
        return;
    }
    refused++;
    refused_by[second]++;
    if (now - c->asked_at > longest_refusal_ns)
        longest_refusal_ns = now - c->asked_at;
    k->due = now + (k->by_ms ? c->retry_ms * MILLISECOND : c->retry_s * SECOND);
    if (opt.obey && k->due <= begun_at + opt.patience_s * SECOND)
        come_again(k);
    else {
        gave_up += opt.obey != 0;
        end_client(k);
    }
}

static void read_answer(struct conn *c)
{
    buf_room(&c->in, READ);
    ssize_t n = recv(c->fd, c->in.p + c->in.len, READ - 1, 0);
    if (n < 0 && errno == EAGAIN)
        return;
    if (n <= 0 && !c->client) { /* an idle one was closed: it stays in the list and is opened when needed */
        close(c->fd);
        c->open = false;
        return;
    }
    const char *wrong = n <= 0 ? "cut" : NULL;
    if (n > 0) {
        c->in.len += (size_t)n;
        wrong = read_head(c);
    }
    if (wrong || !c->client) {
        reason(wrong ? wrong : "unasked bytes");
        if (c->client) {
            end_client(c->client);
            set_idle(c, false);
        }
        return;
    }
    if (!c->has_head)
        return;
    int64_t here = (int64_t)(c->in.len - c->in.off), take = here < c->left ? here : c->left;
    c->body_bytes += take;
    c->in.off += (size_t)take;
    c->left -= take;
    if (c->left == 0) {
        judge(c);
        set_idle(c, true);
    }
}

/* ---- the run -------------------------------------------------------------------------- */

static void note_return(void)
{
    if (return_count == return_cap) {
        return_cap = return_cap ? 2 * return_cap : 4096;
        returns = realloc(returns, sizeof *returns * (size_t)return_cap);
        if (!returns)
            die("realloc");
    }
    returns[return_count++] = now_ns() - begun_at;
}

static void run(void)
{
    int64_t came = 0;
    begun_at = now_ns();
    for (int i = 0; i < pid_count; i++)
        cpu_before[i] = process_cpu_ns(pids[i]);
    while (finished < opt.requests) {
        struct epoll_event events[512];
        int64_t now = now_ns(), wake = now + SECOND / 10;
        while (idle_count && came < opt.requests && arrival(came) <= now)
            ask(&clients[came++]);
        while (idle_count && heap_len && heap[0]->due <= now) {
            struct client *k = first_to_return();
            note_return();
            ask(k);
        }
        if (came < opt.requests && arrival(came) < wake)
            wake = arrival(came);
        if (heap_len && heap[0]->due < wake)
            wake = heap[0]->due;
        if (!idle_count && wake <= now) {
            starved++;
            wake = now + MILLISECOND;
        }
        int64_t left = wake - now_ns();
        int n = epoll_wait(poll_fd, events, 512, left <= 0 ? 0 : (int)((left + MILLISECOND - 1) / MILLISECOND));
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (!c->open)
                continue;
            if ((events[i].events & EPOLLOUT) && !c->connected && c->client && !send_request(c)) {
                reason("connect");
                end_client(c->client);
                set_idle(c, false);
            } else if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR))
                read_answer(c);
        }
    }
}

static void print_list(const char *name, const int64_t *values, int64_t count, int64_t unit)
{
    printf(",\"%s\":[", name);
    for (int64_t i = 0; i < count; i++)
        printf("%s%lld", i ? "," : "", (long long)(values[i] / unit));
    printf("]");
}

static void report(int64_t wall, const int64_t *cpu)
{
    int64_t seconds = wall / SECOND + 1;
    printf("{\"served\":%lld,\"refused\":%lld,\"broken\":%lld,\"starved\":%lld,\"gave_up\":%lld,\"wall_ns\":%lld,"
           "\"own_cpu_ns\":%lld,\"longest_ns\":%lld,\"longest_refusal_ns\":%lld",
           (long long)served, (long long)refused, (long long)broken, (long long)starved, (long long)gave_up,
           (long long)wall, (long long)own_cpu_ns(), (long long)longest_ns, (long long)longest_refusal_ns);
    print_list("cpu_ns", cpu, pid_count, 1);
    print_list("attempts", attempts, MAX_ATTEMPTS, 1);
    print_list("served_by_second", served_by, seconds < MAX_SECONDS ? seconds : MAX_SECONDS, 1);
    print_list("refused_by_second", refused_by, seconds < MAX_SECONDS ? seconds : MAX_SECONDS, 1);
    print_list("returns_ms", returns, return_count, MILLISECOND);
    printf(",\"reasons\":{");
    for (int i = 0; i < MAX_REASONS && reasons[i].what; i++)
        printf("%s\"%s\":%lld", i ? "," : "", reasons[i].what, (long long)reasons[i].count);
    printf("}}\n");
}

static const struct { const char *name; const char **text; int64_t *number; } OPTIONS[] = {
    {"host", &opt.host, NULL}, {"model", &opt.model, NULL}, {"pids", &opt.pids, NULL}, {"port", NULL, &opt.port},
    {"requests", NULL, &opt.requests}, {"rate-milli-s", NULL, &opt.rate_milli_s}, {"obey", NULL, &opt.obey},
    {"patience-s", NULL, &opt.patience_s}, {"connections", NULL, &opt.connections}, {"delay-us", NULL, &opt.delay_us},
    {"vary", NULL, &opt.vary}, {"limit-s", NULL, &opt.limit_s}, {"seed", NULL, &opt.seed},
};
enum { OPTION_COUNT = sizeof OPTIONS / sizeof OPTIONS[0] };

static void read_options(int argc, char **argv)
{
    for (int i = 1; i + 1 < argc; i += 2) {
        int at = 0;
        while (at < OPTION_COUNT && (strncmp(argv[i], "--", 2) || strcmp(argv[i] + 2, OPTIONS[at].name)))
            at++;
        if (at == OPTION_COUNT) {
            fprintf(stderr, "arrivals: no option %s\n", argv[i]);
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
    random_state = (uint64_t)opt.seed * 0x9E3779B97F4A7C15ULL + 1;
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    bound_life((unsigned)opt.limit_s);
    poll_fd = epoll_create1(EPOLL_CLOEXEC);
    clients = calloc((size_t)opt.requests, sizeof *clients);
    heap = calloc((size_t)opt.requests, sizeof *heap);
    conns = calloc((size_t)opt.connections, sizeof *conns);
    idle = calloc((size_t)opt.connections, sizeof *idle);
    if (poll_fd < 0 || !clients || !heap || !conns || !idle)
        die("start");
    for (int64_t i = 0; i < opt.connections; i++)
        idle[idle_count++] = &conns[i];
    for (int64_t i = 0; i < opt.requests; i++)
        clients[i].by_ms = opt.obey == 2 || (opt.obey == 3 && i % 2);
    run();
    int64_t wall = now_ns() - begun_at, cpu[MAX_PIDS];
    for (int i = 0; i < pid_count; i++)
        cpu[i] = cpu_before[i] < 0 ? -1 : process_cpu_ns(pids[i]) - cpu_before[i];
    report(wall, cpu);
    return 0;
}
