// On Linux: that a decoding step reads each page of the weights by the thread that wrote it first. Pages are protected
// and a handler of the fault notes who touched them.
#include "flashgla/nn/pages.h"

#include <gtest/gtest.h>

#if defined(__linux__)
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <string>
#include <vector>

#include "flashgla/base/memory.h"
#include "flashgla/base/team.h"
#include "flashgla/model/language_model.h"
#include "flashgla/model/quantise.h"

namespace flashgla::model {
namespace {

// Who touches which of the whole pages of a piece of memory first, while it lives. One at a time.
class Watch {
 public:
  Watch(std::byte* begin, std::size_t bytes) {
    page_ = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
    begin_ = (reinterpret_cast<std::uintptr_t>(begin) + page_ - 1) / page_ * page_;
    end_ = (reinterpret_cast<std::uintptr_t>(begin) + bytes) / page_ * page_;
    first_ = std::vector<std::atomic<long>>((end_ - begin_) / page_);
    current_ = this;
    struct sigaction action {};
    action.sa_sigaction = [](int, siginfo_t* info, void*) { current_->note(info); };
    action.sa_flags = SA_SIGINFO;
    ::sigaction(SIGSEGV, &action, &before_);
    protect(begin_, end_ - begin_, PROT_NONE);
  }
  ~Watch() {
    protect(begin_, end_ - begin_, PROT_READ | PROT_WRITE);
    ::sigaction(SIGSEGV, &before_, nullptr);
    current_ = nullptr;
  }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  // The whole pages.
  struct Piece {
    std::uintptr_t begin = 0, page = 1;
  };
  Piece piece() const { return {begin_, page_}; }
  std::vector<long> threads() const { return {first_.begin(), first_.end()}; }  // of each page; 0: nobody

 private:
  static void protect(std::uintptr_t at, std::size_t bytes, int access) {
    if (::mprotect(reinterpret_cast<void*>(at), bytes, access) != 0) ::_exit(3);
  }

  void note(const siginfo_t* info) {
    const auto at = reinterpret_cast<std::uintptr_t>(info->si_addr);
    if (at < begin_ || at >= end_) {  // somebody else's fault: it comes again, without this handler
      ::sigaction(SIGSEGV, &before_, nullptr);
      return;
    }
    long nobody = 0;
    first_[(at - begin_) / page_].compare_exchange_strong(nobody, ::syscall(SYS_gettid));
    protect(at / page_ * page_, page_, PROT_READ | PROT_WRITE);
  }

  static inline Watch* current_ = nullptr;
  std::uintptr_t page_ = 0, begin_ = 0, end_ = 0;
  std::vector<std::atomic<long>> first_;
  struct sigaction before_ {};
};

constexpr const char* kConfig = R"({"model_type": "gla", "hidden_size": 1024, "num_hidden_layers": 1, "num_heads": 4,
  "intermediate_size": 1408, "vocab_size": 1024, "tie_word_embeddings": false})";

struct Counts {
  std::int64_t same = 0, other = 0, read = 0;
};

// Of the pages between the first and the last byte of a model's values of one kind, which are zeros.
Counts compare(Context& context, LanguageModel& model, DecodeState& state, bool packed) {
  std::vector<nn::Parameter*> own;
  std::byte *begin = nullptr, *end = nullptr;
  for (nn::Parameter* parameter : model.parameters().parameters()) {
    if ((parameter->value.dtype == DType::u8) != packed) continue;
    own.push_back(parameter);
    auto* const first = static_cast<std::byte*>(parameter->value.data);
    if (begin == nullptr) begin = first;
    end = first + parameter->value.bytes();
  }
  const auto bytes = static_cast<std::size_t>(end - begin);
  std::vector<long> written, read;
  Watch::Piece piece;
  {
    const Watch watch(begin, bytes);
    nn::place_pages(own, context.threads());
    written = watch.threads();
    piece = watch.piece();
  }
  const Tensor tokens = Tensor::zeros(Shape({1}), DType::i32);  // whose embedding is of the calling thread's share
  const Tensor logits = Tensor::empty(Shape({1, model.config().vocab_size}), DType::f32);
  {
    const NobodyHelps each_its_own;
    model.step(context, tokens, state, logits);  // scratch memory and helpers are there from now on
    const Watch watch(begin, bytes);
    model.step(context, tokens, state, logits);
    read = watch.threads();
  }
  // Those of small matrices, which one thread writes, are read by whoever needs them.
  std::vector<bool> small(read.size());
  for (const nn::Parameter* parameter : own) {
    constexpr std::size_t kSmall = 32 * 1024;
    if (parameter->value.bytes() > kSmall) continue;
    const auto first = reinterpret_cast<std::uintptr_t>(parameter->value.data), last = first + parameter->value.bytes();
    for (std::uintptr_t at = std::max(first, piece.begin); at < last; ++at) {
      if (const std::size_t page = (at - piece.begin) / piece.page; page < small.size()) small[page] = true;
    }
  }
  Counts counts;
  for (std::size_t i = 1; i + 1 < read.size(); ++i) {
    EXPECT_NE(written[i], 0) << "page " << i << " of " << read.size() << " was written by nobody";
    if (read[i] == 0 || small[i]) continue;
    ++counts.read;
    if (written[i - 1] != written[i] || written[i + 1] != written[i]) continue;  // may be of two threads' rows
    ++(read[i] == written[i] ? counts.same : counts.other);
  }
  return counts;
}

TEST(Pages, AreReadByTheThreadThatWroteThemFirst) {
  const ModelConfig config = parse_config(kConfig, "test");
  for (const char* kind : {"bf16", "q8", "q4"}) {
    const bool packed = std::string(kind) != "bf16";
    nn::Placements placements;
    if (packed) {
      const QuantisationPreset preset = find_quantisation_preset(kind);
      placements = [preset](const nn::Parameter& parameter) {
        return nn::Placement{preset.of(parameter.quantisation), nullptr};
      };
    }
    LanguageModel model(config, DType::bf16, Device::cpu(), false, placements);
    for (const nn::Parameter* parameter : model.parameters().parameters()) {
      zero_memory(parameter->value.data, parameter->value.bytes(), Device::cpu());
    }
    for (const int threads : {1, 2, 3, 16}) {
      Context context(Device::cpu(), threads);
      DecodeState state = model.make_state(1);
      const Counts counts = compare(context, model, state, packed);
      const std::string what = std::string(kind) + " on " + std::to_string(threads) + " threads: ";
      EXPECT_EQ(counts.other, 0) << what << "of " << counts.same + counts.other << " pages";
      // A page is left out at each end of a share and of a matrix.
      EXPECT_GE(counts.same * 20, counts.read * (threads > 3 ? 16 : 19)) << what << "of " << counts.read << " pages";
      RecordProperty(std::string(kind) + "_" + std::to_string(threads),
                     std::to_string(counts.same) + " of " + std::to_string(counts.read));
    }
  }
}

}  // namespace
}  // namespace flashgla::model
#endif
