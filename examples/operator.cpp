// The operator: queries, keys, values and log gates of a sequence in, outputs and the state after it out; then one
// token.
#include <cstdio>
#include <vector>

#include "flashgla/ops/gated_linear_attention/gated_linear_attention.h"

int main() {
  namespace gla = flashgla::ops::gated_linear_attention;
  using namespace flashgla;
  const Shape keys{1, 100, 2, 32}, values{1, 100, 2, 64};  // [batch, time, heads, width]
  std::vector<float> q(keys.numel(), 0.5f), k(keys.numel(), 0.1f), g(keys.numel(), -0.05f), v(values.numel(), 1.0f);
  const TensorView Q(q.data(), keys), K(k.data(), keys), G(g.data(), keys), V(v.data(), values);
  const Tensor o = Tensor::empty(values, DType::f32), state = Tensor::zeros({1, 2, 32, 64}, DType::f32);

  Context context;  // the CPU, all threads
  gla::forward(context, {.q = Q, .k = K, .v = V, .g = G}, {.o = o, .ht = state});
  std::printf("token 0: %.4f, token 99: %.4f, ", o->select(1, 0).as<float>()[0], o->select(1, 99).as<float>()[0]);

  const TensorView next = o->select(1, 0);  // [batch, heads, width]; the state is updated in place
  gla::step(context, {.q = Q.select(1, 0), .k = K.select(1, 0), .v = V.select(1, 0), .g = G.select(1, 0)}, state, {},
            next);
  std::printf("token 100: %.4f\n", next.as<float>()[0]);
}
