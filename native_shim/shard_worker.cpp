// shard_worker: one process, one layer range of one model, served over its standard streams or a Unix socket
// (spec/worker-protocol.md).
//
// Sources (C++17 and one C11 file); the engine that is not meant compiles to nothing:
//   shard_worker.cpp worker_service.cpp worker_sessions.cpp worker_links.cpp worker_ring.cpp worker_json.cpp
//   worker_protocol.cpp worker_engine.cpp worker_file.cpp worker_range.cpp worker_whole.cpp boundary_bundle.c
// Include folders: this one, and of llama.cpp include, ggml/include, vendor, and src for llama-boundary.h (patched).
// Libraries: llama, ggml, ggml-base. With -DBB_UNPATCHED it runs on the library as upstream ships it.
//
// SPDX-License-Identifier: MIT
#include "worker_engine.h"
#include "worker_protocol.h"
#include "worker_service.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include <fcntl.h>
#ifdef __linux__
#include <sched.h>
#endif
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

using namespace worker;

namespace {

enum status { STATUS_OK = 0, STATUS_NOT_STARTED = 2, STATUS_BAD_STREAM = 3 };

const char usage[] =
    "usage: shard_worker --model FILE [--range START:END] [--threads N] [--ctx N] [--batch N] [--ubatch N] [--seqs N]\n"
    "                    [--kv-unified] [--swa-full on|off] [--flash-attn on|off] [--type-k f16|q8_0|f32]\n"
    "                    [--type-v f16|q8_0|f32]\n"
    "                    [--no-mmap] [--mlock] [--no-warmup] [--socket PATH | --stdio] [--max-bundle BYTES]\n"
    "                    [--processors LIST] [--poll 0..100] [--no-pin] [--stall SECONDS] [--idle SECONDS] [--verbose]\n"
    "                    [--state-dir DIR] [--session-grace SECONDS] [--keep-answers BYTES]\n"
    "Runs layers START to END (not included; -1: all) of a GGUF model. Speaks the protocol of spec/worker-protocol.md\n"
    "on its standard streams, or on a Unix socket that it makes. --processors: those to compute on, such as 0,2-3; all\n"
    "that the process may use, unless it is given. --poll: how long an idle thread of the pool spins\n"
    "before it sleeps. --no-pin: do not give each thread a processor of its own where there are as many threads as\n"
    "processors. --no-warmup: no token is computed before the first request. --swa-full off: a sliding window keeps\n"
    "its last positions alone. --stall: how long a message may be under way, either way, and a second more for every\n"
    "16 MiB of it; --idle: how long a peer may say nothing when it waits for no answer (0: for ever). Then its\n"
    "connection is closed.\n"
    "--state-dir: where sessions are saved. --session-grace: how long a session stays when the connections that\n"
    "opened it are gone. --keep-answers: how much is kept of answers, for requests that come again.\n";

//
// options
//

struct options {
    engine_options engine;
    std::string socket; // empty: standard streams
    session_options sessions;
    bool warmup = true; // compute a token before anybody asks for one
    uint64_t max_bundle = MAX_BUNDLE;
    struct patience patience;
};

// Beyond it the library fills gigabytes with the bookkeeping of its cells before it finds that the cache has no room.
constexpr uint64_t MAX_POSITIONS = 1u << 24;

uint64_t parse_number(const std::string &name, const std::string &text, uint64_t least, uint64_t most) {
    const bool digits = !text.empty() && text.size() <= 19 && text.find_first_not_of("0123456789") == std::string::npos;
    const uint64_t value = digits ? strtoull(text.c_str(), nullptr, 10) : 0;
    if (!digits || value < least || value > most) {
        fail(CODE_ARGUMENT, "%s is '%s', not an integer from %llu to %llu", name.c_str(), text.c_str(),
             (unsigned long long)least, (unsigned long long)most);
    }
    return value;
}

void parse_range(const std::string &text, engine_options &engine) {
    const size_t colon = text.find(':');
    long bounds[2] = {0, 0};
    bool good = colon != std::string::npos;
    for (int i = 0; good && i < 2; i++) {
        const std::string part = i == 0 ? text.substr(0, colon) : text.substr(colon + 1);
        char *end = nullptr;
        errno = 0;
        bounds[i] = strtol(part.c_str(), &end, 10);
        good = !part.empty() && (part[0] == '-' || (part[0] >= '0' && part[0] <= '9')) && *end == '\0' && errno == 0 &&
               bounds[i] >= INT32_MIN && bounds[i] <= INT32_MAX;
    }
    if (!good) {
        fail(CODE_ARGUMENT, "--range is '%s', not START:END with two integers", text.c_str());
    }
    engine.start = (int32_t)bounds[0];
    engine.end = (int32_t)bounds[1];
}

// Keeps this thread, and those that it starts, to the processors of a list such as 0,2-3.
void use_processors(const std::string &text) {
#ifdef __linux__
    cpu_set_t allowed, wanted;
    CPU_ZERO(&allowed);
    CPU_ZERO(&wanted);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        fail(CODE_ARGUMENT, "--processors: the system does not say which there are: %s", reason(errno).c_str());
    }
    for (size_t at = 0; at <= text.size();) {
        const size_t end = std::min(text.find(',', at), text.size());
        const std::string part = text.substr(at, end - at);
        const size_t dash = part.find('-');
        const uint64_t first = parse_number("--processors", part.substr(0, dash), 0, CPU_SETSIZE - 1);
        const uint64_t last =
            dash == std::string::npos ? first : parse_number("--processors", part.substr(dash + 1), first, CPU_SETSIZE - 1);
        for (uint64_t i = first; i <= last; i++) {
            if (!CPU_ISSET(i, &allowed)) {
                fail(CODE_ARGUMENT, "--processors is '%s', and processor %d is none that this process may use", text.c_str(),
                     (int)i);
            }
            CPU_SET(i, &wanted);
        }
        at = end + 1;
    }
    if (sched_setaffinity(0, sizeof(wanted), &wanted) != 0) {
        fail(CODE_ARGUMENT, "--processors %s: %s", text.c_str(), reason(errno).c_str());
    }
#else
    fail(CODE_ARGUMENT, "--processors %s: this system keeps no thread to a processor", text.c_str());
#endif
}

ggml_type parse_type(const std::string &name, const std::string &text) {
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_F32}) {
        if (text == ggml_type_name(type)) {
            return type;
        }
    }
    fail(CODE_ARGUMENT, "%s is '%s', not f16, q8_0 or f32", name.c_str(), text.c_str());
}

options parse_options(int argc, char **argv) {
    options o;
    bool stdio = false;
    for (int i = 1; i < argc; i++) {
        const std::string name = argv[i];
        const auto value = [&]() -> std::string {
            if (i + 1 >= argc) {
                fail(CODE_ARGUMENT, "%s needs a value", name.c_str());
            }
            return argv[++i];
        };
        const auto integer = [&](uint64_t least, uint64_t most) { return parse_number(name, value(), least, most); };
        if (name == "--model") {
            o.engine.path = value();
        } else if (name == "--range") {
            parse_range(value(), o.engine);
        } else if (name == "--threads") {
            o.engine.threads = (int32_t)integer(1, GGML_MAX_N_THREADS);
        } else if (name == "--poll") {
            o.engine.poll = (uint32_t)integer(0, 100);
        } else if (name == "--processors") {
            use_processors(value());
        } else if (name == "--ctx") {
            o.engine.ctx = (uint32_t)integer(1, MAX_POSITIONS);
        } else if (name == "--batch") {
            o.engine.batch = (uint32_t)integer(1, MAX_POSITIONS);
        } else if (name == "--ubatch") {
            o.engine.ubatch = (uint32_t)integer(1, MAX_POSITIONS);
        } else if (name == "--seqs") {
            o.engine.seqs = (uint32_t)integer(1, llama_max_parallel_sequences());
        } else if (name == "--kv-unified") {
            o.engine.kv_unified = true;
        } else if (name == "--swa-full") {
            const std::string text = value();
            if (text != "on" && text != "off") {
                fail(CODE_ARGUMENT, "--swa-full is '%s', not on or off", text.c_str());
            }
            o.engine.swa_full = text == "on";
        } else if (name == "--flash-attn") {
            const std::string text = value();
            if (text != "on" && text != "off") {
                fail(CODE_ARGUMENT, "--flash-attn is '%s', not on or off", text.c_str());
            }
            o.engine.flash_attn = text == "on";
        } else if (name == "--type-k") {
            o.engine.type_k = parse_type(name, value());
        } else if (name == "--type-v") {
            o.engine.type_v = parse_type(name, value());
        } else if (name == "--no-mmap") {
            o.engine.mmap = false;
        } else if (name == "--mlock") {
            o.engine.mlock = true;
        } else if (name == "--no-warmup") {
            o.warmup = false;
        } else if (name == "--no-pin") {
            o.engine.pin = false;
        } else if (name == "--verbose") {
            o.engine.verbose = true;
        } else if (name == "--socket") {
            o.socket = value();
            if (o.socket.empty()) {
                fail(CODE_ARGUMENT, "--socket needs a path");
            }
        } else if (name == "--stdio") {
            stdio = true;
        } else if (name == "--max-bundle") {
            o.max_bundle = integer(0, MAX_BUNDLE);
        } else if (name == "--stall") {
            o.patience.stall = std::chrono::seconds(integer(1, 86400));
        } else if (name == "--idle") {
            o.patience.idle = std::chrono::seconds(integer(0, 31536000));
        } else if (name == "--state-dir") {
            o.sessions.state_dir = value();
            if (o.sessions.state_dir.empty()) {
                fail(CODE_ARGUMENT, "--state-dir needs a path");
            }
            state_folder{o.sessions.state_dir}; // so that a folder that is none is found before the model is loaded
        } else if (name == "--session-grace") {
            o.sessions.grace = std::chrono::seconds(integer(0, 86400));
        } else if (name == "--keep-answers") {
            o.sessions.keep_answers = integer(0, 1ull << 40);
        } else {
            fail(CODE_ARGUMENT, "there is no option '%s'", name.c_str());
        }
    }
    if (o.engine.path.empty()) {
        fail(CODE_ARGUMENT, "--model FILE is missing");
    }
    if (stdio && !o.socket.empty()) {
        fail(CODE_ARGUMENT, "--stdio and --socket exclude each other");
    }
    return o;
}

//
// no memory left
//

// Address space that is given back then: to end what a request has built takes memory too (a JSON list moves its elements
// to end them), and a destructor that finds none ends the process. One part is for an allocation that may be such a one,
// after which others are refused; the other for what follows from a refusal.
constexpr size_t SPARE_MEMORY = 32u << 20;
std::atomic<void *> spare_memory[2] = {};

void hold_spare_memory() { // by one thread
    for (std::atomic<void *> &part : spare_memory) {
        if (!part) {
            part = malloc(SPARE_MEMORY);
        }
    }
}

void on_no_memory() {
    void *part = spare_memory[std::uncaught_exceptions() > 0].exchange(nullptr);
    if (!part) {
        throw std::bad_alloc();
    }
    free(part); // the allocation is tried again
}

//
// the socket and its file
//

// The file that is ours to remove, fixed before anything can end the process. Only async-signal-safe calls.
char socket_path[sizeof(sockaddr_un::sun_path)];
struct stat socket_file;
std::atomic<bool> socket_ours{false};

void remove_socket() {
    struct stat now;
    if (socket_ours.exchange(false) && lstat(socket_path, &now) == 0 && now.st_ino == socket_file.st_ino &&
        now.st_dev == socket_file.st_dev) {
        unlink(socket_path);
    }
}

[[noreturn]] void end(int status) {
    remove_socket();
    _exit(status); // reader threads may wait in read(); nothing of theirs is taken down
}

extern "C" void on_signal(int number) {
    remove_socket();
    signal(number, SIG_DFL);
    raise(number);
}

//
// llama.cpp ends the process
//

// Assertions and faults in the library cannot be survived, but their cause can be said in one line. While the model is
// loaded they are a start that fails like any other; afterwards a crash stays a crash. Only async-signal-safe calls.
const char *model_path = "";
std::atomic<bool> computing{false}; // the first token, as part of loading
std::atomic<bool> loaded{false};
std::atomic<bool> cause_said{false};
thread_local bool said_here = false;

void say_cause(const char *cause) {
    if (cause_said.exchange(true)) {
        while (!said_here) {
            pause(); // another thread of the same graph, which ends the process when it has said its cause
        }
        return; // the signal that follows an assertion
    }
    said_here = true;
    char line[4096];
    size_t n = 0;
    const auto add = [&](const char *text) {
        for (; *text && n < sizeof(line) - 1; text++) {
            line[n++] = iscntrl((unsigned char)*text) ? ' ' : *text;
        }
    };
    if (loaded) {
        add("shard_worker: stopped by a fault: ");
    } else {
        add("shard_worker: error 4 load: ");
        add(computing ? "computing a token with " : "loading ");
        add(model_path);
        add(" made llama.cpp stop: ");
    }
    add(cause);
    line[n++] = '\n';
    if (write(STDERR_FILENO, line, n) < 0) {
        // there is nobody to tell
    }
}

extern "C" void on_assertion(const char *message) {
    say_cause(message);
    if (!loaded) {
        end(STATUS_NOT_STARTED);
    }
}

extern "C" void on_fault(int number) {
    char cause[] = "signal 00";
    char *digit = cause + 7;
    if (number >= 10) {
        *digit++ = (char)('0' + number / 10);
    }
    *digit++ = (char)('0' + number % 10);
    *digit = '\0';
    say_cause(cause);
    if (!loaded) {
        end(STATUS_NOT_STARTED);
    }
    remove_socket();
    signal(number, SIG_DFL);
    raise(number); // comes when this handler has returned
}

// An exception that nobody waits for, such as that of a reader without memory for its last word.
[[noreturn]] void on_uncaught() {
    try {
        if (const std::exception_ptr thrown = std::current_exception()) {
            std::rethrow_exception(thrown);
        }
    } catch (const std::exception &e) {
        say_cause(e.what());
    } catch (...) { // NOLINT(bugprone-empty-catch): the signal is all that can be said
    }
    abort();
}

void watch_faults(const std::string &path) {
    model_path = path.c_str();
    std::set_terminate(on_uncaught);
    ggml_set_abort_callback(on_assertion);
    static char stack[1 << 16]; // for a stack that has overflowed
    stack_t other = {};
    other.ss_sp = stack;
    other.ss_size = sizeof(stack);
    sigaltstack(&other, nullptr);
    struct sigaction action = {};
    action.sa_handler = on_fault;
    action.sa_flags = SA_ONSTACK;
    for (const int number : {SIGABRT, SIGFPE, SIGSEGV, SIGBUS, SIGILL}) {
        sigaction(number, &action, nullptr);
    }
}

sockaddr_un socket_address(const std::string &path) {
    sockaddr_un address = {};
    address.sun_family = AF_UNIX;
    if (path.size() >= sizeof(address.sun_path)) {
        fail(CODE_ARGUMENT, "the socket path has %zu bytes, and %zu are possible: %s", path.size(),
             sizeof(address.sun_path) - 1, path.c_str());
    }
    memcpy(address.sun_path, path.c_str(), path.size() + 1);
    return address;
}

// Whether a process listens behind an existing socket file.
bool is_live(const sockaddr_un &address) {
    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0) {
        fail(CODE_ARGUMENT, "no socket could be made: %s", reason(errno).c_str());
    }
    fcntl(fd, F_SETFL, O_NONBLOCK); // a full backlog is an answer too
    const bool refused = connect(fd, (const sockaddr *)&address, sizeof(address)) != 0 && errno == ECONNREFUSED;
    close(fd);
    return !refused;
}

int listen_at(const std::string &path) {
    const sockaddr_un address = socket_address(path);
    const size_t slash = path.rfind('/');
    const std::string folder = slash == std::string::npos ? "." : path.substr(0, slash + 1);

    // Two workers that find the same stale file: the lock on the folder lets one of them look, bind and listen at a time.
    const int lock = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (lock < 0) {
        fail(CODE_ARGUMENT, "the folder of the socket %s cannot be opened: %s", path.c_str(), reason(errno).c_str());
    }
    // Who may write there can put a socket of his own in this one's place.
    struct stat owned;
    if (fstat(lock, &owned) != 0 || owned.st_uid != geteuid() || (owned.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
        fail(CODE_ARGUMENT,
             "the folder of the socket %s has owner %u and mode %04o: it must be that of user %u, who runs this worker, "
             "and nobody else may write there",
             path.c_str(), (unsigned)owned.st_uid, (unsigned)(owned.st_mode & 07777), (unsigned)geteuid());
    }
    flock(lock, LOCK_EX);

    const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    if (fd < 0) {
        fail(CODE_ARGUMENT, "no socket could be made: %s", reason(errno).c_str());
    }
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    struct stat there;
    if (lstat(path.c_str(), &there) == 0) {
        if (!S_ISSOCK(there.st_mode)) {
            fail(CODE_ARGUMENT, "%s exists and is not a socket", path.c_str());
        }
        if (is_live(address)) {
            fail(CODE_ARGUMENT, "another process listens on %s", path.c_str());
        }
        unlink(path.c_str());
    }
    const mode_t mask = umask(0177);
    const int bound = bind(fd, (const sockaddr *)&address, sizeof(address));
    const int why = errno;
    umask(mask);
    if (bound != 0) {
        fail(CODE_ARGUMENT, "the socket %s cannot be made: %s", path.c_str(), reason(why).c_str());
    }
    memcpy(socket_path, address.sun_path, sizeof(socket_path));
    if (lstat(path.c_str(), &socket_file) == 0) {
        socket_ours = true;
    }
    if (listen(fd, 128) != 0) {
        fail(CODE_ARGUMENT, "the socket %s cannot be listened on: %s", path.c_str(), reason(errno).c_str());
    }
    close(lock);
    return fd;
}

//
// threads
//

// A signal tied to the parent would be tied to the thread that started us; the parent's number is not.
void watch_parent(pid_t parent) {
    std::thread([parent] {
        while (getppid() == parent) {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
        }
        end(STATUS_OK);
    }).detach();
}

std::atomic<int> open_connections{0};
constexpr int MAX_CONNECTIONS = 64;

// The computing thread may have a processor of its own; a reader that inherited it would wait for it.
class processors {
public:
#ifdef __linux__
    processors() noexcept { known_ = sched_getaffinity(0, sizeof(set_), &set_) == 0; }
    void use_all() const {
        if (known_) {
            sched_setaffinity(0, sizeof(set_), &set_);
        }
    }

private:
    cpu_set_t set_;
    bool known_;
#else
    void use_all() const {}
#endif
};
const processors at_start;

void serve(const std::shared_ptr<connection> &peer, request_queue &queue, uint64_t max_bundle) {
    open_connections++;
    try {
        std::thread([peer, &queue, max_bundle] {
            at_start.use_all();
            read_messages(peer, queue, max_bundle);
            open_connections--;
        }).detach();
    } catch (const std::system_error &e) {
        open_connections--;
        fail(CODE_NO_MEMORY, "no thread can be had for the connection: %s", e.what());
    }
}

// Serves a connection, or says why not.
void take(int fd, bool spared, request_queue &queue, const options &o) {
    fcntl(fd, F_SETFD, FD_CLOEXEC);
    std::shared_ptr<connection> peer;
    try {
        peer = std::make_shared<connection>(fd, fd, o.patience);
    } catch (const std::bad_alloc &) {
        close(fd);
        return;
    }
    try {
        try {
            if (!spared) {
                fail(CODE_LIMIT, "this worker has no descriptor left for a connection");
            }
            if (open_connections >= MAX_CONNECTIONS) {
                fail(CODE_LIMIT, "this worker has %d connections, as many as it takes", MAX_CONNECTIONS);
            }
            serve(peer, queue, o.max_bundle);
        } catch (const failure &f) {
            peer->send(TYPE_ERROR | TYPE_REPLY, 0, error_text(f), nullptr, 0);
        }
    } catch (const std::bad_alloc &) { // NOLINT(bugprone-empty-catch): there is none even for the reason
    }
}

void accept_connections(int listener, request_queue &queue, const options &o) {
    // Held back, so that who comes when no descriptor is left can be told.
    const auto hold_back = [] { return open("/dev/null", O_RDONLY | O_CLOEXEC); };
    int spare = hold_back();
    for (;;) {
        int fd = accept(listener, nullptr, nullptr);
        if (fd < 0 && (errno == EMFILE || errno == ENFILE) && spare >= 0) {
            close(spare);
            spare = -1;
            fd = accept(listener, nullptr, nullptr); // waits for the next one: without a descriptor it does not
        }
        if (fd < 0 && errno != EINTR && errno != ECONNABORTED) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100)); // others will close theirs
        }
        if (spare < 0) {
            spare = hold_back();
        }
        if (fd >= 0) {
            take(fd, spare >= 0, queue, o);
        }
        if (spare < 0) {
            spare = hold_back();
        }
    }
}

// The streams become private descriptors, so that nothing a library prints can get between the messages.
std::shared_ptr<connection> take_standard_streams(const options &o) {
    const int in = fcntl(STDIN_FILENO, F_DUPFD_CLOEXEC, 3);
    const int out = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    if (in < 0 || out < 0) {
        fail(CODE_ARGUMENT, "standard input or output is closed");
    }
    const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    if (null >= 0) {
        dup2(null, STDIN_FILENO);
        close(null);
    }
    dup2(STDERR_FILENO, STDOUT_FILENO);
    return std::make_shared<connection>(in, out, o.patience);
}

// One line, whatever a file says: names in it may hold anything.
void say_refusal(int code, const std::string &message) {
    std::string line;
    for (const char c : message) {
        char escaped[8];
        snprintf(escaped, sizeof(escaped), iscntrl((unsigned char)c) ? "\\x%02x" : "%c", (unsigned char)c);
        line += escaped;
    }
    fprintf(stderr, "shard_worker: error %d %s: %s\n", code, code_name(code), line.c_str());
}

int run(const options &o) {
    int listener = -1;
    std::shared_ptr<connection> streams;
    if (o.socket.empty()) {
        streams = take_standard_streams(o);
    } else {
        listener = listen_at(o.socket);
    }

    watch_faults(o.engine.path);
    std::unique_ptr<engine> engine = open_engine(o.engine);
    if (o.warmup) {
        computing = true;
        engine->warm_up();
    }
    auto &queue = *new request_queue(o.max_bundle); // outlives this function: reader threads hold on to it
    service service(*engine, o.sessions, o.max_bundle, queue,
                    [&](const std::shared_ptr<connection> &link) { serve(link, queue, o.max_bundle); });
    if (streams) {
        serve(streams, queue, o.max_bundle);
    } else {
        std::thread(accept_connections, listener, std::ref(queue), std::cref(o)).detach();
    }
    std::set_new_handler(on_no_memory);
    loaded = true;
    fprintf(stderr, "shard_worker: ready\n");

    for (;;) {
        hold_spare_memory();
        std::optional<request> next = queue.pop(service.next_release());
        // a message counts as of when it came, however long it has waited for its turn
        service.release_abandoned(next ? next->came : std::chrono::steady_clock::now());
        if (!next) {
            continue;
        }
        request &r = *next;
        bool stop = false;
        const bool from_driver = streams && r.from == streams; // and not over a link
        if (r.refused()) {
            service.refuse(r);
            r.from->drop();
            if (from_driver) {
                say_refusal(service::code_of(r), r.text);
                return STATUS_BAD_STREAM;
            }
        } else if (r.what == request::END) {
            if (from_driver) {
                return STATUS_OK;
            }
        } else if (r.what == request::CUT) {
            if (from_driver) {
                say_refusal(CODE_FRAME, r.text);
                return STATUS_BAD_STREAM;
            }
        } else if (r.from->alive()) {
            stop = service.answer(r);
        }
        if (r.what != request::MESSAGE) {
            service.connection_gone(*r.from, r.came);
        }
        if (stop) {
            return STATUS_OK;
        }
        if (streams && !streams->alive()) {
            return STATUS_BAD_STREAM; // the reader of our answers is gone or does not read
        }
    }
}

} // namespace

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN); // a file that may not get longer is an error of write()
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGHUP, on_signal);
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(usage, stdout);
        return STATUS_OK;
    }
    try {
        watch_parent(getppid());
        const options o = parse_options(argc, argv);
        end(run(o));
    } catch (const failure &f) {
        say_refusal(f.code, f.message);
    } catch (const std::bad_alloc &) {
        say_refusal(CODE_NO_MEMORY, loaded ? "there is no memory to go on" : "there is no memory to start with");
    } catch (const std::system_error &e) {
        say_refusal(CODE_NO_MEMORY, std::string("no thread can be had: ") + e.what());
    } catch (const std::exception &e) {
        say_refusal(CODE_LOAD, e.what());
    }
    end(loaded ? STATUS_BAD_STREAM : STATUS_NOT_STARTED);
}
