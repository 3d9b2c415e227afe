#include <gtest/gtest.h>
#include <signal.h>
#include <sys/time.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "flashgla/base/file.h"
#include "flashgla/base/names.h"
#include "flashgla/ops/matmul/choices.h"
#include "flashgla/ops/matmul/cpu/tiles.h"
#include "flashgla/ops/matmul/implementations.h"
#include "flashgla/ops/matmul/plans.h"
#include "flashgla/ops/matmul/tests/cases.h"
#include "testing/compare.h"
#include "testing/conformance.h"
#include "testing/random.h"
#include "testing/temporary_folder.h"

namespace flashgla::ops::matmul {
namespace {

TEST(Matmul, EveryImplementationAgreesWithTheReference) {
  testing::Coverage coverage(implementations());
  for (const Shape& size : {Shape({1, 1, 1}), Shape({1, 37, 65}), Shape({16, 33, 100}), Shape({17, 5, 3}),
                            Shape({140, 70, 33}), Shape({2, 3, 0})}) {
    // Every pair of properties in every combination.
    for (const int bits : {0b00000, 0b00111, 0b11001, 0b11110, 0b01010, 0b01101, 0b10011, 0b10100}) {
      const Form form{(bits & 1) != 0, (bits & 2) != 0, (bits & 4) != 0, (bits & 8) != 0, (bits & 16) != 0};
      testing::OperatorCase to_activation = product_case(size[0], size[1], size[2], form, Kind::activation);
      to_activation.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f32, DType::bf16}};
      EXPECT_EQ(testing::check_conformance(to_activation, coverage), "");
      testing::OperatorCase to_f32 = product_case(size[0], size[1], size[2], form, Kind::accumulator);
      to_f32.dtypes = {{DType::bf16, DType::bf16}};
      EXPECT_EQ(testing::check_conformance(to_f32, coverage), "");
    }
  }
  // Layers over the rows of a prompt, in panels: whole ones and not.
  for (const Shape& size : {Shape({17, 1027, 1033}), Shape({64, 1024, 1024})}) {
    for (const Form form : {Form{false, true, false, false, true}, Form{false, true, false, true, false}}) {
      testing::OperatorCase layer = product_case(size[0], size[1], size[2], form, Kind::activation);
      layer.dtypes = {{DType::f32, DType::bf16}};
      EXPECT_EQ(testing::check_conformance(layer, coverage), "");
    }
  }
  // An addend that lies elsewhere, in c's order.
  for (const Shape& size : {Shape({1, 37, 65}), Shape({140, 72, 33}), Shape({4, 3, 0})}) {
    for (const Form form : {Form{false, true, false, false, true, true}, Form{true, false, true, false, false, true}}) {
      testing::OperatorCase sum = product_case(size[0], size[1], size[2], form, Kind::activation);
      sum.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f32, DType::bf16}};
      EXPECT_EQ(testing::check_conformance(sum, coverage), "");
    }
  }
  EXPECT_EQ(coverage.missing(), "");
}

// An addend that is c is a sum in place. One elsewhere gives the same bits on CPUs; cuBLASLt rounds some bf16 ones
// apart.
TEST(Matmul, AnAddendInPlaceIsASum) {
  for (const Device device : testing::test_devices()) {
    Context context(device);
    for (const DType dtype : {DType::f32, DType::bf16}) {
      for (const auto& [m, k] : {std::pair{1, 520}, std::pair{40, 520}, std::pair{140, 72}, std::pair{300, 520}}) {
        const Tensor a = testing::copied_to(testing::random_normal({m, k}, dtype, 1), device);
        const Tensor b = testing::copied_to(testing::random_normal({k, 136}, dtype, 2), device);
        const Tensor addend = testing::copied_to(testing::random_normal({m, 136}, dtype, 3), device);
        const Tensor elsewhere = Tensor::empty({m, 136}, dtype, device);
        const Tensor in_place = testing::copied_to(addend, device), itself = testing::copied_to(addend, device);
        run(context, a, b, elsewhere, {false, {}, addend});
        run(context, a, b, in_place, {true, {}, {}});
        run(context, a, b, itself, {false, {}, itself});
        context.queue().synchronize();
        const Tensor expected = testing::copied_to(elsewhere, Device::cpu());
        const Tensor sum = testing::copied_to(in_place, Device::cpu());
        EXPECT_TRUE(testing::same_bits(testing::copied_to(itself, Device::cpu()), sum)) << name_of(dtype) << m;
        if (device == Device::cpu()) {
          EXPECT_TRUE(testing::same_bits(sum, expected)) << name_of(dtype) << m;
        }
      }
    }
  }
}

TEST(Matmul, SeveralTilesAndPanels) {
  testing::Coverage coverage(implementations());
  for (const Form form : {Form{false, true, false, false, true}, Form{true, false, false, true, false}}) {
    testing::OperatorCase large = product_case(600, 1100, 70, form, Kind::activation);
    large.dtypes = {{DType::f32, DType::f32}, {DType::bf16, DType::bf16}, {DType::f32, DType::bf16}};
    EXPECT_EQ(testing::check_conformance(large, coverage), "");
  }
  // Few rows on tensor cores, with 16 bytes to a load.
  for (const std::int64_t m : {5, 8, 9, 16}) {
    for (const Form form : {Form{false, true, false, true, true}, Form{false, true, true, false, false}}) {
      testing::OperatorCase few = product_case(m, 70, 8 * 37, form, Kind::activation);
      few.dtypes = {{DType::f32, DType::bf16}};
      EXPECT_EQ(testing::check_conformance(few, coverage), "");
    }
  }
  // A panel holds 512 columns when K is this large.
  testing::OperatorCase wide = product_case(17, 530, 8200, {false, true, false, false, false}, Kind::activation);
  wide.dtypes = {{DType::f32, DType::bf16}};
  EXPECT_EQ(testing::check_conformance(wide, coverage), "");
}

// A program that catches signals (Ctrl-C, a profiler's clock) while products run: see OneDnnScope.
TEST(Matmul, SignalsMayComeAtAnyTime) {
  struct sigaction action {};
  struct sigaction before {};
  static volatile sig_atomic_t caught;
  caught = 0;
  action.sa_handler = [](int) { caught = caught + 1; };
  action.sa_flags = SA_RESTART;
  ASSERT_EQ(::sigaction(SIGALRM, &action, &before), 0);
  const itimerval every_half_millisecond{{0, 500}, {0, 500}}, never{};
  Context context;
  const Tensor a = testing::random_normal({600, 512}, DType::f32, 1);
  const Tensor b = testing::random_normal({512, 700}, DType::f32, 2);
  const Tensor expected = Tensor::empty({600, 700}, DType::f32);
  const Tensor c = Tensor::empty({600, 700}, DType::f32);
  run(context, a, b, expected);
  ASSERT_EQ(::setitimer(ITIMER_REAL, &every_half_millisecond, nullptr), 0);
  const auto start = std::chrono::steady_clock::now();
  bool same = true;
  while (same && (caught < 400 || std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500))) {
    run(context, a, b, c);
    same = std::memcmp(c->data, expected->data, c->bytes()) == 0;
    if (std::chrono::steady_clock::now() - start > std::chrono::seconds(30)) break;
  }
  ::setitimer(ITIMER_REAL, &never, nullptr);
  ::sigaction(SIGALRM, &before, nullptr);
  EXPECT_TRUE(same);
  EXPECT_GE(caught, 400);
}

TEST(Matmul, TilesCoverThePlaneOnceWhateverItsShape) {
  for (const std::int64_t m : {1, 15, 64, 130, 512, 513, 1024, 4096, 5000}) {
    for (const std::int64_t n : {1, 16, 70, 256, 512, 600, 2816, 32000}) {
      const Tiles tiles = tiles_of(m, n);
      std::int64_t area = 0;
      for (std::int64_t i = 0; i < tiles.count(); ++i) {
        const Tile tile = tile_at(tiles, i);
        ASSERT_GT(tile.rows, 0);
        ASSERT_GT(tile.cols, 0);
        ASSERT_LE(tile.rows, 512);
        ASSERT_LE(tile.cols, 512);
        area += tile.rows * tile.cols;
      }
      EXPECT_EQ(area, m * n) << m << " x " << n;
      if (m * n >= 256 * 256) {
        EXPECT_GE(tiles.count(), 4) << m << " x " << n;
      }
    }
  }
}

TEST(Matmul, SmallPlanesOfLongSumsAreCutIntoPartsOfThem) {
  EXPECT_EQ(parts_of_k(tiles_of(256, 256), 4096), 4);
  EXPECT_EQ(parts_of_k(tiles_of(256, 256), 2047), 1);
  EXPECT_EQ(parts_of_k(tiles_of(256, 256), 1 << 20), 4);
  EXPECT_EQ(parts_of_k(tiles_of(4096, 256), 4096), 1);
  EXPECT_EQ(tiles_of(4096, 256).count(), 16);
  EXPECT_EQ(tiles_of(1024, 1024).count(), 16);
}

TEST(Matmul, LongSumsHaveTheSameBitsForAnyNumberOfThreads) {
  for (const std::int64_t length : {2048, 2500}) {
    const Tensor a = testing::random_normal({length, 96}, DType::f32, 1);
    const Tensor b = testing::random_normal({length, 130}, DType::f32, 2);
    const Tensor first = testing::random_normal({96, 130}, DType::f32, 3);
    Tensor expected;
    for (const int threads : {1, 2, 5}) {
      Context context(Device::cpu(), threads);
      const Tensor c = testing::copied_to(first, Device::cpu());
      run(context, a->transpose(0, 1), b, c, {true});
      if (!expected) expected = c;
      EXPECT_TRUE(testing::same_bits(c, expected)) << threads << " threads";
    }
    const Tensor defined = testing::copied_to(first, Device::cpu());
    Context context;
    context.force_implementation("reference");
    run(context, a->transpose(0, 1), b, defined, {true});
    EXPECT_EQ(testing::check_close("c", expected, defined, 1e-5), "");
  }
}

TEST(Matmul, LayersHaveTheSameBitsForAnyNumberOfThreads) {
  const Tensor x = testing::random_normal({700, 1030}, DType::f32, 1);
  const Tensor weight = testing::random_normal({1050, 1030}, DType::bf16, 2);
  const Tensor bias = testing::random_normal({1050}, DType::f32, 3);
  Tensor expected;
  for (const int threads : {1, 2, 5, 16}) {  // from tasks of many rows to tasks of few
    Context context(Device::cpu(), threads);
    const Tensor y = Tensor::empty({700, 1050}, DType::f32);
    run(context, x, weight->transpose(0, 1), y, {false, bias});
    if (!expected) expected = y;
    EXPECT_TRUE(testing::same_bits(y, expected)) << threads << " threads";
  }
}

TEST(Matmul, SelectionTakesTheFastPathForItsShapes) {
  auto selected = [](std::int64_t m, DType a, DType b, DType c, bool b_transposed, std::int64_t side = 64) {
    const Problem problem{m, side, side, a, b, c, true, b_transposed, true, false};
    return std::string(select("matmul", implementations(), problem, Architecture{}, "").name);
  };
  EXPECT_EQ(selected(1, DType::f32, DType::bf16, DType::f32, true), "stream");
  EXPECT_EQ(selected(16, DType::bf16, DType::bf16, DType::bf16, true), "stream");
  EXPECT_EQ(selected(16, DType::f32, DType::f32, DType::f32, false), "onednn");
  EXPECT_EQ(selected(17, DType::f32, DType::f32, DType::f32, true), "onednn");
  EXPECT_EQ(selected(17, DType::f32, DType::bf16, DType::f32, true), "onednn_converted");
  EXPECT_EQ(selected(17, DType::f32, DType::bf16, DType::f32, true, 1024), "panels");
  EXPECT_EQ(selected(1024, DType::f32, DType::bf16, DType::f32, true, 1024), "panels");
  EXPECT_EQ(selected(1024, DType::f32, DType::bf16, DType::f32, false, 1024), "onednn_converted");
  EXPECT_EQ(selected(1024, DType::f32, DType::f32, DType::f32, true, 1024), "onednn");
  EXPECT_EQ(selected(4096, DType::f32, DType::bf16, DType::f32, true, 1024), "onednn_converted");
  EXPECT_EQ(selected(17, DType::f64, DType::f64, DType::f64, true), "reference");
}

#ifdef FLASHGLA_CUDA
TEST(Matmul, SelectionOnCuda) {
  auto selected = [](std::int64_t m, DType a, DType b, bool b_transposed) {
    const Problem problem{m, 64, 64, a, b, a, true, b_transposed, true, false};
    const Architecture hopper{Device::Kind::cuda, 90, 0, 132};
    return testing::error_of([&] { throw Error(select("matmul", implementations(), problem, hopper, "").name); });
  };
  EXPECT_EQ(selected(1, DType::f32, DType::bf16, true), "cuda_few_rows");
  EXPECT_EQ(selected(16, DType::f32, DType::bf16, true), "cuda_few_rows");
  EXPECT_EQ(selected(4, DType::bf16, DType::bf16, true), "cuda_few_rows");
  EXPECT_EQ(selected(5, DType::bf16, DType::bf16, true), "cublaslt");
  EXPECT_EQ(selected(16, DType::bf16, DType::bf16, false), "cublaslt");
  EXPECT_EQ(selected(17, DType::f32, DType::f32, true), "cublaslt");
  EXPECT_EQ(selected(17, DType::f32, DType::bf16, true), "cublaslt_in_parts");
  EXPECT_EQ(selected(17, DType::f64, DType::f64, true).find("no implementation fits (") != std::string::npos, true);
}
#endif

// Products of every kind: one plan each.
void run_some_products(Context& context, std::vector<Tensor>& results) {
  const Device device = context.device();
  const Tensor x = testing::copied_to(testing::random_normal({300, 520}, DType::bf16, 1), device);
  const Tensor w = testing::copied_to(testing::random_normal({136, 520}, DType::bf16, 2), device);
  const Tensor dy = testing::copied_to(testing::random_normal({300, 136}, DType::bf16, 3), device);
  results.push_back(Tensor::empty({300, 136}, DType::bf16, device));
  run(context, x, w.view().transpose(0, 1), results.back());
  results.push_back(Tensor::empty({300, 520}, DType::bf16, device));
  run(context, dy, w, results.back());
  results.push_back(Tensor::zeros({136, 520}, DType::f32, device));
  run(context, dy.view().transpose(0, 1), x, results.back(), {true, {}});
}

TEST(Matmul, PlansAreTimedOnceAndTravel) {
  for (const Device device : testing::test_devices()) {
    const testing::TemporaryFolder folder;
    Context first(device), second(device), third(device);
    EXPECT_EQ(load_plan_cache(first, folder.path()), Notices());
    std::vector<Tensor> ignored, expected, actual, cached;
    run_some_products(first, ignored);
    EXPECT_EQ(time_plans(first), Notices());
    const std::string plans = export_plans(first);
    EXPECT_EQ(time_plans(first), Notices());
    EXPECT_EQ(export_plans(first), plans);
    run_some_products(first, expected);
    EXPECT_EQ(save_plan_cache(first, folder.path()), Notices());

    EXPECT_EQ(import_plans(second, plans), Notices());
    run_some_products(second, actual);
    EXPECT_EQ(time_plans(second), Notices());
    EXPECT_EQ(export_plans(second), plans);
    EXPECT_EQ(load_plan_cache(third, folder.path()), Notices());
    run_some_products(third, cached);
    EXPECT_EQ(export_plans(third), plans);
    first.queue().synchronize();
    second.queue().synchronize();
    third.queue().synchronize();
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const Tensor result = testing::copied_to(expected[i], Device::cpu());
      EXPECT_TRUE(testing::same_bits(result, testing::copied_to(actual[i], Device::cpu()))) << i;
      EXPECT_TRUE(testing::same_bits(result, testing::copied_to(cached[i], Device::cpu()))) << i;
    }
    if (device.kind == Device::Kind::cpu) {
      EXPECT_EQ(plans, "");
      continue;
    }
    EXPECT_EQ(choices_from_text(plans).by_product.size(), 3u);
    Choices others = choices_from_text(plans);
    others.made_by = "another";
    EXPECT_EQ(import_plans(third, to_text(others)).size(), 1u);
    EXPECT_EQ(export_plans(third), plans);
    for (const auto& file : std::filesystem::directory_iterator(folder.path())) {
      write_file(file.path().string(), plans.substr(0, plans.size() / 2));
    }
    EXPECT_EQ(load_plan_cache(third, folder.path()).size(), 1u);
    EXPECT_EQ(save_plan_cache(third, folder.path()), Notices());
    EXPECT_EQ(load_plan_cache(third, folder.path()), Notices());
  }
}

TEST(Matmul, ProgramsThatKeepChoicesAtOnceLoseNoneAndAgree) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path() + "/one.products";
  constexpr int kPrograms = 8, kProducts = 20;
  std::vector<std::vector<Choices>> seen(kPrograms);
  std::vector<std::thread> programs;
  programs.reserve(kPrograms);
  for (int program = 0; program < kPrograms; ++program) {
    programs.emplace_back([&, program] {
      for (int i = 0; i < kProducts; ++i) {  // two of each product, which chose otherwise
        Choices choices;
        choices.made_by = "a library";
        Choice& choice = choices.by_product["product " + std::to_string(program / 2 * kProducts + i)];
        choice.algorithm[0] = static_cast<std::uint64_t>(program);
        choice.microseconds = 1.0;
        choices.by_product["never timed"] = Choice{};
        seen[static_cast<std::size_t>(program)].push_back(add_to_file(path, choices));
      }
    });
  }
  for (std::thread& program : programs) program.join();
  const Choices kept = choices_from_text(read_file(path));
  EXPECT_EQ(kept.by_product.size(), static_cast<std::size_t>(kPrograms / 2 * kProducts));
  for (const auto& of_program : seen) {
    for (const Choices& all : of_program) {
      for (const auto& [product, choice] : all.by_product) EXPECT_EQ(kept.by_product.at(product), choice) << product;
    }
  }
}

// Sums over parts of a long K cancel but for a half: a part that was rounded to bf16 would lose it. Before and after
// plans are timed.
TEST(Matmul, PartsOfALongSumMeetInF32) {
  constexpr std::int64_t kLength = 1 << 16;
  for (const Device device : testing::test_devices()) {
    Context context(device);
    for (const auto& [m, n] : {std::pair{64, 64}, std::pair{300, 136}, std::pair{5, 512}}) {
      const Tensor ones = Tensor::empty({m, kLength}, DType::f32), terms = Tensor::empty({kLength, n}, DType::f32);
      std::fill_n(ones.as<float>(), ones->numel(), 1.0f);
      std::fill_n(terms.as<float>(), terms->numel() / 2, 1.0f);
      std::fill_n(terms.as<float>() + terms->numel() / 2, terms->numel() / 2, -1.0f);
      std::fill_n(terms.as<float>(), n, 1.5f);
      const Tensor a = testing::copied_to(testing::converted(ones, DType::bf16), device);
      const Tensor b = testing::copied_to(testing::converted(terms, DType::bf16), device);
      const Tensor c = Tensor::empty({m, n}, DType::bf16, device);
      for (const bool timed : {false, true}) {
        if (timed) time_plans(context);
        run(context, a, b, c);
        context.queue().synchronize();
        const Tensor sums = testing::converted(testing::copied_to(c, Device::cpu()), DType::f32);
        const float* values = sums.as<float>();
        EXPECT_EQ(std::count(values, values + m * n, 0.5f), m * n)
            << flashgla::name_of(device) << " " << m << "x" << n << (timed ? " timed" : "");
      }
    }
  }
}

// A sequence's tokens do not depend on how many others are decoded beside it.
TEST(Matmul, ARowIsTheSameWhateverTheRowsBesideItInABucket) {
  for (const Device device : testing::test_devices()) {
    if (device.kind == Device::Kind::cpu) continue;
    Context context(device);
    const Tensor x = testing::copied_to(testing::random_normal({64, 520}, DType::bf16, 1), device);
    const Tensor w = testing::copied_to(testing::random_normal({136, 520}, DType::bf16, 2), device);
    for (const auto& [least, most] : {std::pair{1, 4}, std::pair{5, 16}, std::pair{17, 32}, std::pair{33, 64}}) {
      const Tensor all = Tensor::empty({most, 136}, DType::bf16, device);
      run(context, x.view().slice(0, 0, most), w.view().transpose(0, 1), all);
      for (const int rows : {least, least + 1, (least + most) / 2, most - 1}) {
        const Tensor some = Tensor::empty({rows, 136}, DType::bf16, device);
        run(context, x.view().slice(0, 0, rows), w.view().transpose(0, 1), some);
        context.queue().synchronize();
        EXPECT_TRUE(testing::same_bits(testing::copied_to(some, Device::cpu()),
                                       testing::copied_to(all, Device::cpu()).view().slice(0, 0, rows)))
            << rows << " of " << most;
      }
    }
  }
}

TEST(Matmul, ChoicesAreWrittenAndReadBack) {
  Choices choices;
  choices.made_by = "cuBLASLt 1 on some device";
  choices.by_product["1x2x3 a bf16 N 3 16"] = {{1, 2, 3, 4, 5, 6, 7, ~std::uint64_t{0}}, 12.345678901234567};
  choices.by_product["another"] = {};
  const std::string text = to_text(choices);
  const Choices back = choices_from_text(text);
  EXPECT_EQ(back.made_by, choices.made_by);
  EXPECT_EQ(back.by_product, choices.by_product);
  auto error = [](const std::string& damaged) { return testing::error_of([&] { choices_from_text(damaged); }); };
  EXPECT_EQ(error(""), "choices of products: cut short");
  EXPECT_EQ(error(text.substr(0, text.size() / 2)), "choices of products: cut short");
  std::string damaged = text;
  damaged[text.size() / 2] ^= 1;
  EXPECT_EQ(error(damaged), "choices of products: damaged (its checksum differs)");
}

TEST(Matmul, RefusesBadArgumentsByName) {
  Context context;
  const Tensor a = Tensor::zeros({4, 6}, DType::f32), b = Tensor::zeros({6, 5}, DType::f32);
  const Tensor c = Tensor::zeros({4, 5}, DType::f32), wide = Tensor::zeros({4, 12}, DType::f32);
  const Tensor half = Tensor::zeros({6, 5}, DType::f16), doubles = Tensor::zeros({4, 5}, DType::f64);
  auto error = [&](const TensorView& x, const TensorView& y, const TensorView& z, const Options& options = {}) {
    return testing::error_of([&] { run(context, x, y, z, options); });
  };
  EXPECT_EQ(error(a, b, c), "no error");
  EXPECT_EQ(error(TensorView(), b, c), "matmul: a is absent; expected a tensor");
  EXPECT_EQ(error(a, c, c), "matmul: b has shape [4,5]; expected [6,N] (as a's columns)");
  EXPECT_EQ(error(a, b, wide), "matmul: c has shape [4,12]; expected [4,5]");
  EXPECT_EQ(error(a, half, c), "matmul: b has dtype f16; expected f32 or bf16");
  EXPECT_EQ(error(a, b, doubles), "matmul: c has dtype f64; expected f32");
  EXPECT_EQ(error(a, b, c, {false, a}), "matmul: bias has shape [4,6]; expected [5] (as b's columns)");
  EXPECT_EQ(error(a, b, c, {false, {}, a}), "matmul: addend has shape [4,6]; expected [4,5] (as c)");
  EXPECT_EQ(error(a, b, c, {true, {}, c}), "matmul: addend is present; expected none with accumulate");
  const Tensor turned = Tensor::zeros({5, 4}, DType::f32);
  EXPECT_EQ(error(a, b, c, {false, {}, turned.view().transpose(0, 1)}),
            "matmul: addend has strides [1,4]; expected 1 where c has it");
  TensorView skipping = wide.view();
  skipping.shape = Shape({4, 6});
  skipping.stride = {12, 2};
  EXPECT_EQ(error(skipping, b, c), "matmul: a has strides [12,2]; expected one of them 1");
}

}  // namespace
}  // namespace flashgla::ops::matmul
