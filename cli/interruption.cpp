#include "cli/interruption.h"

#include <unistd.h>

#include <atomic>
#include <cstring>

namespace flashgla::cli {

namespace {

std::atomic<int> interruptions = 0;
static_assert(std::atomic<int>::is_always_lock_free);
InterruptionScope::Options said;  // the texts of the living scope

void write_error(const char* text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_signal(int) {
  if (interruptions.fetch_add(1) > 0) {
    write_error(said.second);
    ::_exit(kInterruptedCode);
  }
  write_error(said.first);
}

}  // namespace

InterruptionScope::InterruptionScope(const Options& options) : terminate_(options.terminate) {
  said = options;
  forget_interruptions();
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = options.restart ? SA_RESTART : 0;
  ::sigaction(SIGINT, &action, &interrupt_before_);
  if (!terminate_) return;
  ::sigaction(SIGTERM, &action, &terminate_before_);
  ::sigaction(SIGHUP, nullptr, &hang_up_before_);
  if (hang_up_before_.sa_handler != SIG_IGN) ::sigaction(SIGHUP, &action, nullptr);  // not under nohup
}

InterruptionScope::~InterruptionScope() {
  ::sigaction(SIGINT, &interrupt_before_, nullptr);
  if (!terminate_) return;
  ::sigaction(SIGTERM, &terminate_before_, nullptr);
  ::sigaction(SIGHUP, &hang_up_before_, nullptr);
}

bool interrupted() { return interruptions.load() > 0; }

void forget_interruptions() { interruptions = 0; }

}  // namespace flashgla::cli
