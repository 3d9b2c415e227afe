// The verbs of the program `flashgla`: one file each. Each adds its subcommand, whose callback makes one call into the
// library.
#pragma once

namespace CLI {
class App;
}

namespace flashgla::cli {

void add_bench(CLI::App& app);
void add_convert(CLI::App& app);
void add_data(CLI::App& app);
void add_doctor(CLI::App& app);
void add_evaluate(CLI::App& app);
void add_generate(CLI::App& app);
void add_info(CLI::App& app);
void add_plot(CLI::App& app);
void add_train(CLI::App& app);

}  // namespace flashgla::cli
